"""docs/reference.md: its examples run, and it has every public name of the three documents, and no other."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()

NAMES = {
    "TensorRT Edge-LLM": """
        NVFP4Tensor Dim3 kNvfp4ElemsPerTile kNvfp4Int4PerTilePayload quantized_data block_scale global_scale strides
        scaleNumKTiles scaleExpertStride scaleMDimIdx scaleKDimIdx nvfp4TensorScaleAt tileOffsetInt4 tileScaleIndex
        readBlockScaleWord readBlockScaleWordLinear loadTileUint4 loadTileUint32Lane dequant_fp8_scales
        TRT_DynamicQuantize
    """,
    "Launches of TensorRT Edge-LLM": """
        LlmFmhaParams LlmFmhaPagedParams VitFmhaParams FmhaV2LlmParams FmhaV2VitParams kvCacheCapacity tokensPerPage
        windowSizeLeft attentionScale skipSoftmaxThresholdLog2 data dynamic_shapes dynamic_strides makePackedTensor
        makeStridedTensor makeCuSeqLenTensor fmha_d64_Tensor_q_tensor_t fmha_d128_Tensor_q_tensor_t
        cute_dsl_<variant>_wrapper WrapperArgT WrapperArity preflight CUTE_DSL_FMHA_BLACKWELL_ENABLED
    """,
    "Atlas": """
        QuantizedWeight weight weight_scale weight_scale_2 weight_scale_2_vec input_scale null is_null
        has_per_row_scale2 concat_rows transpose_for_gemm transpose_for_gemm_gs transpose_concat_for_gemm
        transpose_concat_for_gemm_gs transpose_concat_for_gemm_padded predequant_to_fp8 fp8_gemm_t GROUP_SIZE clone
        clone_from fmt from QuantWeight DevicePtr GpuBackend KernelHandle w4a16_gemv w4a16_gemv_prs w4a16_gemv_logits
        w4a16_gemv_batch2 w4a16_gemv_batch3 w4a16_gemv_batch4 w4a16_gemv_batch8 w4a16_gemv_batch16
        w4a16_gemv_batch32 w4a16_gemv_dual w4a16_gemv_qg w4a16_gemv_qkvz w4a16_gemv_silu_input w4a16_gemm_n128_ldb
        w4a16_gemm_t moe_w4a16_grouped_gemm quantize_bf16_to_nvfp4 WeightQuantFormat
    """,
    "MAX": """
        Fp4WeightLoader from_kernel_args a packed scales M N K in_type a_layout packed_layout scale_layout SF
        NVFP4_SF_VECTOR_SIZE load_a_frag bounded arow0 k0 a_rc decode_b_frag_regc bcol0 rb cb decode_strip_to_smem
        bytes_per_thread cols_per_thread b_view n_abs n_local col0 b_view_origin b_view_layout b_view_addr
        frag_row_base frag_col_base _apple_frag_layout run run_smem_decode dispatch
    """,
}
"""System -> the names that its document has, and those of its kernels that take such a weight."""

SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", TEXT, re.MULTILINE))


def entries(section: str) -> dict[str, str]:
    """Heading -> what is below it."""
    return dict(re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", SECTIONS[section], re.MULTILINE))


@pytest.mark.parametrize("section", NAMES)
def test_every_name_has_one_heading(section):
    found = [name for heading in entries(section) for name in re.findall(r"`([^`]+)`", heading)]
    assert sorted(found) == sorted(NAMES[section].split())


@pytest.mark.parametrize("section", NAMES)
def test_every_entry_says_what_it_is_here_and_has_an_example(section):
    for heading, text in entries(section).items():
        prose, *examples = text.split("```pycon\n")
        assert re.search(r"\b[Hh]ere\b|[Tt]he kernels? comes? later", prose), heading
        assert len(examples) == 1, heading
        assert ">>> " in examples[0], heading


def test_there_are_no_other_sections():
    assert list(SECTIONS) == list(NAMES)


def test_the_examples_run():
    test = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, "reference.md", "docs/reference.md", 0)
    assert len(test.examples) > 100
    told: list[str] = []
    result = doctest.DocTestRunner().run(test, out=told.append)
    assert (result.failed, "".join(told)) == (0, "")
