"""Patterns that select modules, and the names that engines fuse."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import UsageError
from halfbyte.patterns import FUSED, Patterns, fused_group, is_router, module_class, spellings

A = "model.layers.0.self_attn.q_proj"


def selected(patterns, name, cls=None):
    return Patterns(patterns).first(name, cls)


def matches(pattern, name, cls=None):
    return selected([pattern], name, cls) is not None


MATCHES = [
    # a module name, or the start of one
    ("lm_head", "lm_head", None, True),
    ("lm_head", "lm_head2", None, False),
    ("lm_head", "model.lm_head", None, True),  # without its prefix
    ("lm_head", "draft.lm_head", None, False),
    ("model.layers.0", A, None, True),
    ("model.layers.0", "model.layers.01.mlp", None, False),
    ("model.layers.0.self_attn", A, None, True),
    ("q_proj", A, None, False),
    ("", A, None, False),
    # fnmatch
    ("model.layers.0*", A, None, True),
    ("model.layers.0*", "model.layers.01.mlp", None, True),
    ("*q_proj", A, None, True),
    ("*.q_proj", "q_proj", None, False),
    ("*lm_head*", "model.lm_head", None, True),
    ("model.layers.?.self_attn.[qk]_proj", A, None, True),
    ("model.layers.[1-9].*", A, None, False),
    ("*Q_PROJ", A, None, False),
    ("*", A, None, True),
    # regular expressions, from the start of the name and not to its end
    ("re:.*q_proj$", A, None, True),
    ("re:.*q_proj", A + "_extra", None, True),
    ("re:q_proj", A, None, False),
    (r"re:model\.layers\.(0|1)\..*", A, None, True),
    ("re:.*Q_proj", A, None, False),
    ("re:", A, None, True),
    # classes
    ("Linear", A, "Linear", True),
    ("Linear", A, "Embedding", False),
    ("Linear", A, None, False),
    ("Embedding", "model.embed_tokens", "Embedding", True),
    ("Lin*", A, "Linear", False),
]


@pytest.mark.parametrize(("pattern", "name", "cls", "expected"), MATCHES)
def test_matches(pattern, name, cls, expected):
    assert matches(pattern, name, cls) is expected


@pytest.mark.parametrize("pattern", ["re:(", "re:*", "re:[", "re:(?P<a>x)(?P<a>y)"])
def test_a_broken_regular_expression(pattern):
    with pytest.raises(UsageError, match="not a regular expression") as caught:
        matches(pattern, A)
    assert repr(pattern) in str(caught.value)
    with pytest.raises(UsageError):
        selected([pattern], A)


SELECTED = [
    # fused names select their parts
    ("model.layers.0.self_attn.qkv_proj", A, True),
    ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj", False),
    ("*.gate_up_proj", "model.layers.3.mlp.up_proj", True),
    ("*.gate_up_proj", "model.layers.3.mlp.down_proj", False),
    ("re:.*gate_up_proj", "model.layers.3.mlp.gate_proj", True),
    ("*.w13", "block.experts.1.w3", True),
    # parts do not select their siblings, although v_proj is the end of qkv_proj and up_proj that of gate_up_proj
    ("*.k_proj", A, False),
    ("*v_proj", A, False),
    ("re:.*v_proj$", A, False),
    ("re:.*v_proj", "model.layers.0.self_attn.k_proj", False),
    ("*up_proj", "model.layers.3.mlp.gate_proj", False),
    ("re:.*up_proj$", "model.layers.3.mlp.gate_proj", False),
    # prefixes that come and go with the library's version
    ("layers.0.self_attn.q_proj", A, True),
    ("model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj", True),
    ("model.layers.0.*", "language_model.model.layers.0.self_attn.q_proj", True),
    ("lm_head", "language_model.lm_head", True),
    ("model.language_model.layers.0.*", "model.language_model.layers.0.self_attn.q_proj", True),
    ("visual*", "model.visual.blocks.0.attn.qkv", True),
    ("layers.1.*", A, False),
]


@pytest.mark.parametrize(("pattern", "name", "expected"), SELECTED)
def test_selected(pattern, name, expected):
    assert selected([pattern], name) == (pattern if expected else None)


def test_the_first_pattern_that_selects():
    assert selected(["nothing", "*.q_proj", A], A) == "*.q_proj"
    assert selected([], A) is None
    assert selected(iter(["Linear"]), A, "Linear") == "Linear"


def test_fused_groups():
    assert fused_group(A) == ("model.layers.0.self_attn.qkv_proj", "q_proj")
    assert fused_group("w1") == (".w13", "w1") or fused_group("w1") == ("w13", "w1")
    assert fused_group("model.layers.0.self_attn.o_proj") is None
    for fused, parts in FUSED.items():
        assert {fused_group(f"x.{part}") for part in parts} == {(f"x.{fused}", part) for part in parts}


@given(st.text(max_size=40))
def test_spellings_begin_with_the_name(name):
    found = spellings(name)
    assert found[0] == name
    assert len(found) == len(set(found))


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_text_is_a_pattern(pattern, name):
    if not pattern.startswith("re:"):
        assert matches(pattern, name) in (True, False)
    assert matches(name, name)


@given(st.text("ab.*?[!]", max_size=8), st.text("ab.[]", max_size=8))
def test_a_pattern_is_a_name_its_beginning_or_fnmatch(pattern, name):
    assert matches(pattern, name) is (name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern))


@pytest.mark.parametrize(
    ("name", "ndim", "cls"),
    [
        ("model.embed_tokens", 2, "Embedding"),
        ("transformer.wte", 2, "Embedding"),
        ("shared", 2, "Embedding"),
        ("model.layers.0.mlp.up_proj", 2, "Linear"),
        ("lm_head", 2, "Linear"),
        ("embed_out", 2, "Linear"),
        ("model.norm", 1, None),
        ("conv1d", 3, None),
        ("x", 0, None),
    ],
)
def test_classes(name, ndim, cls):
    assert module_class(name, ndim) == cls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.block_sparse_moe.gate", True),
        ("model.layers.0.feed_forward.router", True),
        ("model.layers.0.mlp.router", True),
        ("model.layers.0.mlp.shared_expert_gate", True),
        ("backbone.layers.0.mixer.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.experts.0.gate_proj", False),
        ("model.layers.0.self_attn.gate", False),
        ("gate", False),
        ("router", True),
    ],
)
def test_routers(name, expected):
    assert is_router(name) is expected


def test_one_string_is_not_taken_for_a_pattern_of_each_letter():
    with pytest.raises(UsageError, match=r"patterns are a list: got 'a\.\*', expected \['a\.\*'\]"):
        Patterns("a.*")
