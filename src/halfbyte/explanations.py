"""What each finding means at length: how it comes about, which engines break on it and how, and what to do."""

from __future__ import annotations

import difflib
import re
from typing import Final

from halfbyte.errors import UsageError
from halfbyte.findings import CODES

EXPLANATIONS: Final[dict[str, str]] = {
    # files and tensors
    "HB101": (
        "The codes of a weight are there and its block scales (or the scale of an FP8 weight) are not, so no value can "
        "be told. vLLM has filled the place of a missing scale with whatever lay in memory, and answered with it. Look "
        "for a shard that was not copied or a tensor that a converter renamed; otherwise export the model again."
    ),
    "HB102": (
        "NVFP4 has one block scale for 16 codes along K, row-major and unpadded: (N, K/16) for a weight of (N, K), and "
        "K a multiple of 16. Half the columns are what older ModelOpt releases wrote for a model that was compressed "
        "already; rows padded to 128 and columns to 4 are swizzled scales, as ComfyUI stores them. An engine that "
        "reads one form as the other gives garbage. MXFP4 has one scale for 32 codes. In a stack of experts the axis "
        "along which there are 8 times as many bytes of codes as scales is K, and the other is N. Export again from "
        "the model before compression, or convert the file with the tool that wrote it."
    ),
    "HB103": (
        "A block scale of byte 7F or FF is NaN. Torch decodes its 16 weights as NaN, and with them every output of the "
        "row; ggml reads 7F as 0 and FF as the number 480, so that the same file gives different weights there. "
        "ModelOpt 0.47 writes FF, with a second scale of 0, for a weight that is all zero. The scales of MXFP4 are "
        "powers of two, of which FF alone is NaN. Quantize the tensor again; halfbyte gives zeros a finite scale."
    ),
    "HB104": (
        "Block scales are non-negative by convention, and the sign of a weight is in its code: bytes 80 to FE do not "
        "belong here. Engines differ: llama.cpp strips the sign bit, and Marlin takes scales to be non-negative and "
        "only warns. The usual reasons are data of another type or damage. Quantize the tensor again."
    ),
    "HB105": (
        "NVFP4 has two levels of scales, and this weight has only the block scales, as models saved by MLX and GGUF "
        "files quantized by llama.cpp do. Such a file means a second scale of 1; an engine that expects one may find "
        "whatever lay in memory, as vLLM did. With one level a block whose largest value is above 2688 is clipped. Add "
        "a second scale of 1 if the producer is known to be single-level; otherwise look for the lost tensor."
    ),
    "HB106": (
        "A scale that multiplies a whole weight must be positive and finite (of an FP8 weight, a row may have 0). Zero "
        "makes every weight 0, NaN and Inf make it NaN or Inf, and a divisor of 0 or one too small to divide by is "
        "Inf. ModelOpt 0.47 writes 0 for a weight that is all zero. Quantize the tensor again."
    ),
    "HB107": (
        "The second scale and the input scale are float32 by convention; some old ModelOpt exports hold bfloat16 for "
        "o_proj. halfbyte widens the value, which changes nothing; a reader that does not look at the dtype takes the "
        "bytes for another number. `convert` to the other dialect writes float32."
    ),
    "HB108": (
        "The second scale is nominally the largest weight / 2688, so that a value above 1 means weights beyond 2688. "
        "More often it is the wrong way round: ModelOpt's weight_scale_2 multiplies, compressed-tensors' "
        "weight_global_scale divides, and a tool that takes one for the other, or inverts twice, is wrong by the "
        "square of the scale. halfbyte goes by the name of the tensor. `verify --against` the original model tells "
        "which it is."
    ),
    "HB109": (
        "A second scale or input scale is one number ([], [1]), in a stack of experts one for each or two for gate and "
        "up of each; pre_quant_scale has K of them, and the scale of an FP8 weight is one number, one for each row, or "
        "one for each 128x128 block. ModelOpt uses the one key weight_scale for all kinds of weights, so a reader that "
        "goes by the name alone takes one kind for another. Export the layer again."
    ),
    "HB110": (
        "Engines join q/k/v and gate/up into one matrix with one second scale. vLLM warns, takes the largest one (the "
        "smallest of a compressed-tensors file) and leaves the block scales as they are, so that the other parts come "
        "out wrong: by 130 % and 271 % where the ratios were 2.3 and 3.7. TensorRT-LLM asserts that the scales are "
        "equal. Averaging them is wrong, too. Quantize with `--share-scale2`; halfbyte's own kernels keep one scale "
        "for each row and are exact."
    ),
    "HB111": (
        "The config promises static activation scales (W4A4), most modules have theirs, and this one does not: it was "
        "not calibrated, as happens to experts. vLLM has multiplied by an uninitialised input scale of 0 where there "
        "was none. Calibrate again with data that reaches the module, or serve the model as W4A16, which needs no "
        "input scales."
    ),
    "HB112": (
        "The config says W4A4 with static activation scales and the file has none, so it is a W4A16 checkpoint under "
        "another name. vLLM has accepted such a checkpoint as W4A4 and multiplied by an uninitialised input scale. Set "
        "the config to W4A16 (quant_algo W4A16_NVFP4; input_activations null), or calibrate."
    ),
    "HB113": (
        "An input scale maps activations to FP4 or FP8 and must be positive and finite: with 0, NaN or Inf every "
        "output of the layer is lost. Zero is what an uncalibrated layer or uninitialised memory looks like. Calibrate "
        "again, or serve the model as W4A16, which ignores input scales."
    ),
    "HB114": (
        "The header gives a tensor a dtype that its role does not allow: block scales are F8_E4M3 (or the same bytes "
        "as U8), other scales F32, BF16 or F16, FP8 data has two axes. Nobody can say what the bytes mean, so halfbyte "
        "refuses to decode them. Export the layer again."
    ),
    "HB115": (
        "A block scale of 0 makes its 16 weights 0, whatever the codes say. It is valid, and every reader must give 0; "
        "but codes that are not 0 show that the block was not: its scale was too small for E4M3 and rounded to 0, "
        "because the second scale is too large for it. Many such blocks cost accuracy: quantize with a smaller second "
        "scale."
    ),
    "HB116": (
        "Not one code of this weight is other than 0, so the layer gives only zeros. That can be meant, as in a pruned "
        "layer; more often it is a hole in a file that was not copied or written to its end; of a stack, each empty "
        "expert is named. Compare with the original model, or fetch the shard again."
    ),
    "HB117": (
        "Block scales 01 to 07 are subnormal E4M3 numbers. They are valid and halfbyte decodes them exactly. vLLM's "
        "Marlin kernels do not: one version decodes them as almost 0, a later one turns scales above 64 in the same "
        "tensor into 64, and the next sets them to 0 where another scale is 448. torchao never writes them. If such an "
        "engine is the target, quantize with a smaller second scale."
    ),
    "HB118": (
        "A tensor of floats holds NaN or Inf, which spreads to every output that it touches. The file is damaged, was "
        "not written to its end, or the model diverged in training. Fetch the shard again or repair the source; "
        "halfbyte quantizes no tensor with such values."
    ),
    "HB119": (
        "FP8 data (E4M3) of byte 7F or FF is NaN, and so is every output that it touches. A cast without clamping "
        "makes it from values above 448: ml_dtypes and old torch give NaN there, new torch saturates. Quantize the "
        "tensor again, clamped to 448."
    ),
    "HB120": (
        "A tensor lies beside a quantized weight and halfbyte does not know its meaning. If it is part of the "
        "arithmetic (a rotation, a low-rank part, a zero point), an engine that ignores it gives wrong outputs and no "
        "error. `convert` within its own dialect carries it, another dialect refuses it. Find out which tool wrote it, "
        "and whether the engine uses it."
    ),
    "HB121": (
        "There is a scale and no quantized weight that it belongs to: nothing will be multiplied by it. The weight was "
        "dropped or renamed, or is dense by now. llama.cpp gave garbage where the scales of experts were there and "
        "never attached. Look for the weight under another name; remove the scale if the weight is dense."
    ),
    "HB122": (
        "compressed-tensors stores a rounded reciprocal, and halfbyte keeps the original number in the metadata of the "
        "shard, so that converting back is exact. Here the two do not belong together: the tensor was changed later, "
        "or the entry is damaged. The entry is ignored and the stored number counts, which is what every engine does. "
        "Converting back may then differ in the last bit."
    ),
    "HB123": (
        "The scale of a quantized KV cache (the largest key or value / 448) must be positive and finite; with 0, NaN "
        "or Inf attention is lost. Calibrate the KV cache again, or remove its scales and its format from the config "
        "together."
    ),
    "HB124": (
        "The input of an expert's last layer is its own, so its calibrated scales differ from expert to expert. Here "
        "all experts of a layer have the same one: the calibration did not reach them, which ModelOpt has done without "
        "a word and which gave token salad, or one value was given to all. W4A16 is not affected, since it ignores "
        "input scales. For W4A4 calibrate again with the experts' layers hooked."
    ),
    "HB125": (
        "Engines join q/k/v and gate/up, which have the same input, and want one input scale for them. TensorRT-LLM "
        "asserts that it is the same, vLLM warns and takes the largest; ModelOpt writes one, computed over the group. "
        "W4A16 is not affected. Calibrate again with an exporter that shares the scale."
    ),
    "HB126": (
        "Engines join q/k/v and gate/up into one product, which has one format. Here one part is quantized and another "
        "is dense or of another kind, so an engine that joins them refuses the checkpoint or reads one part as the "
        "other. Quantize all parts of the layer or none: ignore patterns should name the whole group."
    ),
    "HB127": (
        "Nearly all layers have this module, and this layer has its neighbours but not the module itself. An export, a "
        "merge or a copy has lost it. Models whose layers differ on purpose leave out the whole block, which is not "
        "reported. Compare with the original checkpoint and export it again."
    ),
    "HB128": (
        "All experts of the stack share one second scale, as ModelOpt writes the stacks of Llama 4 and gpt-oss. It is "
        "read exactly. But it is made for the largest weight of all experts: in an expert whose weights are much "
        "smaller the block scales become subnormal E4M3 numbers, which hold fewer bits and which some kernels flush to "
        "zero. HB117 counts them. A scale for each expert, as per-expert exports have it, avoids that."
    ),
    "HB129": (
        "The experts of a layer are numbered from 0 without a gap, and each has the same parts; here some are not in "
        "the file. An engine leaves the place of a missing expert as it was allocated, and every token that the "
        "router sends there gets whatever lay in memory. A shard was not copied, or a tool that merges experts dropped "
        "some. Fetch the shards again, or export the model again."
    ),
    "HB130": (
        "The index (model.safetensors.index.json) lists a tensor that is not in the shard it names, so a reader that "
        "goes by the index does not find it. A shard was replaced or cut, or the index is of another version of the "
        "model. Fetch both again from one source."
    ),
    "HB131": (
        "A shard holds a tensor that the index does not list. A reader that goes by the index does not see it; one "
        "that takes whole shards does, so that the same files give two models. Write the index anew: `convert` to the "
        "same dialect does."
    ),
    "HB132": (
        "A safetensors file lies in the directory and the index does not name it. halfbyte does not read it; a reader "
        "that takes every file of the directory does. It is often left over from another version or a second copy of "
        "the weights. Remove it, or add it to the index."
    ),
    "HB133": (
        "metadata.total_size of the index is not the sum of the tensors' bytes. Nothing decodes differently; a tool "
        "that plans memory by it plans wrongly. Writing the checkpoint again sets it right."
    ),
    "HB134": (
        "The tensors are of a format that halfbyte knows by sight and does not decode yet, such as ComfyUI, MLX, "
        "torchao or FP-Quant. They differ from ModelOpt in more than names: ComfyUI swaps the nibbles and swizzles the "
        "scales, FP-Quant rotates the weights. Nothing is proven about such a file. Convert it with the tool that "
        "wrote it, or start from the original model."
    ),
    "HB135": (
        "A directory with several safetensors files needs model.safetensors.index.json, by which loaders find the "
        "tensors; without it transformers and the engines load one file or none. halfbyte reads all files of the "
        "directory. Write the index again: halfbyte convert to the same dialect with --max-shard-size does."
    ),
    "HB136": (
        "The file holds a layer of experts as one stack and expert by expert, or under two names. An engine loads one "
        "form and ignores the other, or loads both into one place, so that the last one wins; which one it is depends "
        "on the engine. Remove the form that is not meant: `diff` tells whether they agree."
    ),
    "HB137": (
        "The router of a mixture of experts chooses the experts of each token from small differences, and costs next "
        "to nothing in memory. Recipes leave it in bfloat16, and vLLM and SGLang build it as a dense layer: they "
        "refuse a quantized one or read its codes as floats. Quantize again and leave it out; `quantize` does by "
        "itself."
    ),
    "HB138": (
        "A stack gate_up_proj or w13 holds two layers: first the rows of gate and then those of up, the reverse, or "
        "row by row in turn (gpt-oss). The tensor does not show which, and an engine that takes one for the other "
        "computes garbage without an error. halfbyte goes by the file's metadata and by model_type in config.json, and "
        "neither is there. State the order: metadata `halfbyte.experts`, JSON "
        '{"NAME": {"gate_up": "concatenated"}} with "concatenated", "up_first" or "interleaved", or restore '
        "config.json."
    ),
    "HB139": (
        "The weight is quantized in a format that halfbyte recognises and does not decode, such as INT4, INT8 or MXFP8 "
        "beside NVFP4 layers. Its floats were looked through for NaN and Inf, and nothing else is said of it. A "
        "conversion carries its tensors byte for byte. Check it with the tool that wrote it."
    ),
    "HB140": (
        "A suspicion, not a fact. Rows and columns of a real weight differ in size; in the order that the note names "
        "they explain at least twice as much of log2(block scale) as in the order that is read, as where swizzled "
        "scales are taken for linear ones or the reverse, which gives garbage. It is judged from some of the rows, in "
        "whole files only, where N is a multiple of 128 and K of 64; scales without such structure are not suspected. "
        "`verify --against` the dense model, with the option of the hint and "
        "without it, decides."
    ),
    # config
    "HB201": (
        "The tensors are quantized and config.json has no quantization_config, so an engine takes the checkpoint for a "
        "dense one: packed codes have half the width, and scales are tensors that it does not know. Restore the "
        "section; `convert` writes one that says what the tensors are."
    ),
    "HB202": (
        "The config excludes this module, and the file holds it quantized: lm_head is the common case. An engine that "
        "follows the config finds packed codes where it wants floats; vLLM and ollama have had no loader for a "
        "quantized embedding or lm_head, or dropped its second scale. The tensors are the truth for halfbyte. Remove "
        "the module from the list of ignored ones, or dequantize it."
    ),
    "HB203": (
        "The config quantizes this module, and the file holds it dense. Routers that older ModelOpt exports leave out "
        "of the list of exclusions are the common case: vLLM and SGLang break on them. Lists that do not match fused "
        "or prefixed names have led to bfloat16 loaded as FP8 or FP4 without an error. Add the module to the ignored "
        "ones."
    ),
    "HB204": (
        "The config gives this module one kind of quantization and the file has another, such as FP8 where it says "
        "NVFP4. llama.cpp's converter wanted one kind for the whole file and refused mixed ones. halfbyte goes by the "
        "tensors. Write the config anew (`convert` does), and see with `inspect` whether the file has the size that "
        "you expect."
    ),
    "HB205": (
        "config.json and hf_quant_config.json say different things about the same weights. A reader may go by either, "
        "so the same directory can be served in two ways. Correct the one that contradicts the tensors, or let "
        "`convert` write both."
    ),
    "HB206": (
        "The config names another quantization method than the one whose tensor names are in the file. It matters "
        "since ModelOpt's second scale multiplies and compressed-tensors' divides: an engine that goes by the config "
        "looks for tensors that are not there, or reads them the wrong way round. halfbyte goes by the tensors. Let "
        "`convert` write a config that fits."
    ),
    "HB207": (
        "The config names a format for the KV cache and the file has no k_scale or v_scale, or it has them and the "
        "config is silent. In the first case engines use 1.0; in the second the scales are not used. vLLM has lost "
        "such scales by renaming them with q/k/v. Add what is missing, or remove both."
    ),
    "HB208": (
        "The config says that activations are not quantized (W4A16), and the module has an input scale. It is carried "
        "and not used, and does no harm; but a checkpoint that was calibrated for W4A4 may be served as something else "
        "than was meant. Set the config to W4A4 if that is what was measured."
    ),
    "HB209": (
        "A pattern that begins with `re:` does not compile, so nobody can say which modules the config covers; what "
        "the config says of them was not compared with the tensors. Correct the pattern and verify again."
    ),
    "HB210": (
        "NVFP4 has one block scale for 16 values; the shapes of the codes and scales in this file say so, too. The "
        "config names another group size, so an engine that believes it computes the wrong shapes or takes the file "
        "for another format, MXFP4 for instance. Correct the config, or let halfbyte convert write it."
    ),
    "HB211": (
        "config.json states how many layers the model has, and the file holds tensors of fewer. A shard or its entries "
        "in the index are missing, or the config belongs to another model. Engines refuse the checkpoint, or leave "
        "layers uninitialised. Layers beyond that number, for multi-token prediction, are not reported."
    ),
    "HB212": (
        "config.json states a number of experts (num_experts, num_local_experts, n_routed_experts), or the other "
        "layers have more of them, and this layer has fewer: its last ones are missing, or experts were pruned and the "
        "config was not changed. The router still sends tokens to them. Fetch the shards again, or correct the number "
        "in the config and the rows of the router."
    ),
    # options
    "HB301": (
        "A pattern of `--include` or `--exclude` selects no module, which is usually a slip of the pen; what was meant "
        "to be read or left out was not. `inspect` lists the names of modules. A pattern is a name or the start of "
        "one, a wildcard such as `model.layers.*.mlp.*`, or `re:` and a regular expression."
    ),
    "HB302": (
        "An MXFP4 weight became NVFP4 with `--lossy`, and some of its values changed: its block scales span more than "
        "the 17 powers of two that E4M3 holds under one second scale, so the codes of its smallest blocks were rounded "
        "to nearest. The number is the relative Frobenius error of the whole weight. Keep such layers as MXFP4 with "
        "`--mxfp4 keep` where the engine takes them. Or a weight was packed in a layout with `lossy=True`, "
        "whose form of block scales lost some: `marlin` with `scale_format=e4m3` or `dtype=float16` loses none."
    ),
    "HB303": (
        "A weight was packed in a layout whose `zero_blocks` is canonical, such as `fragments`: its form of block "
        "scales has no 0, so where a scale is 0 the codes are stored as 0, and come back as 0. The values are 0 before "
        "and after, but for the sign of a -0. The number is that of the blocks whose codes changed. Converted back, "
        "the checkpoint has the source's values and not all its bytes; `fragments(dtype=float16)` keeps the bytes too."
    ),
    # diff
    "HB401": (
        "A module is in one of the two checkpoints and has no counterpart of that name in the other. It was dropped, "
        "renamed or tied to another (a tied lm_head is often not stored), or is left out of one export. Compare the "
        "names with `inspect`; what has no counterpart was not compared."
    ),
    "HB402": (
        "Decoded, the two tensors are not the same numbers: the checkpoints hold different weights. Two quantizers "
        "rarely agree in every value, since they round in another order, and the report says how far apart they are. "
        "Where one was made from the other by a conversion, which moves codes and scales as they are, a difference "
        "means that something was lost."
    ),
    "HB403": (
        "Decoded, the two tensors are the same numbers, and their bytes are not: another dtype, another split between "
        "block scales and second scale, a rounded reciprocal that leads back to the same number, or -0 in place of 0. "
        "Nothing is computed differently by a reader that follows the format. A note, and no difference."
    ),
    "HB404": (
        "Two modules of one name have different shapes, so that their values cannot be compared. The checkpoints are "
        "of different models, or one holds parts fused, stacked or padded that the other keeps apart. Compare the two "
        "with `inspect`."
    ),
    "HB405": (
        "The weights may agree, and a scale beside them does not: the input scale of activations, pre_quant_scale, or "
        "a scale of the KV cache. Outputs differ wherever an engine uses it; W4A16 ignores input scales. vLLM has lost "
        "activation and KV scales on the way to a kernel, so make sure that both the files and the engine have them."
    ),
    "HB406": (
        "One checkpoint holds this weight in one format and the other in another, such as NVFP4 and bfloat16. That "
        "alone is no difference: whether the decoded values agree is told by a finding of its own."
    ),
    "HB407": (
        "A tensor beside a weight (a bias, an input scale, pre_quant_scale) is in one checkpoint only. A tool that has "
        "no place for it has dropped it, or one of the two was calibrated and the other not. Without a bias or "
        "pre_quant_scale the outputs are wrong and no engine says so; without an input scale the weight is W4A16."
    ),
    "HB408": (
        "One checkpoint has a stack gate_up_proj or w13 and the other has gate and up by themselves. To pair them, the "
        "stack must be taken apart, and nothing states whether its rows are those of gate and then of up, the reverse, "
        "or alternate. They were not compared. State the order: metadata `halfbyte.experts`, or model_type in "
        "config.json; see HB138."
    ),
    # against the original
    "HB501": (
        "Decoded, the weight is farther from its dense twin than rounding to the format costs any tensor: its values "
        "are others, or they stand elsewhere. `verify --against` tries other readings of the same bytes and names the "
        "one that explains the error: nibbles swapped (ComfyUI and BFL files have the high one first), scales that are "
        "swizzled where linear ones are meant or the reverse, a second scale that is inverted or lacks a factor, rows "
        "in another order. A kernel that reads the file by its names gives garbage. Where one reading is right for all "
        "measured NVFP4 modules, the hint ends with the command that repairs the checkpoint (`halfbyte convert` with "
        "options such as `--nibble-order high`); otherwise do what the hint says, or quantize the module again."
    ),
    "HB502": (
        "Decoded, the weight is near its dense twin and not as near as the format allows. Block scales that were "
        "rounded once more do that, to a common second scale or to have it folded in; so do blocks whose scale became "
        "subnormal or 0, and values that were clipped. A recipe that minds the outputs rather than the weights may err "
        "more, and rightly so. Compare with the error of the other modules before you quantize it again. Where a "
        "reading of the bytes explains the error in all modules, the hint ends with the command that repairs them."
    ),
    "HB503": (
        "A quantized module could not be measured: the dense checkpoint has no tensor of its name, has a quantized "
        "one, or the module itself is not sound. Names differ after renames by transformers, such as "
        "`model.language_model.`, and where parts are fused. Nothing is said of such a module; the hint tells why. "
        "Give the checkpoint that it was made from, dequantized if need be."
    ),
    "HB504": (
        "The weight and its dense twin have different shapes, or their values cannot be laid side by side, so that no "
        "error can be told. The two are of different models, or a tool padded, transposed, fused or split the weight. "
        "Give the checkpoint that it was made from; a padded weight needs its own N and K back first."
    ),
}
"""Every code of CODES: what it means, who breaks on it, and what to do."""


def explain(code: str) -> str:
    """What a finding means, which engines break on it and how, and what to do.

    Args:
        code: such as "HB103".

    Returns:
        A paragraph.

    Raises:
        UsageError: no such code; it names near ones.
    """
    known = code.strip().upper()
    if known not in EXPLANATIONS:
        near = _near(known)
        hint = f"near: {', '.join(near)}" if near else "see: halfbyte verify --explain all"
        raise UsageError("no such code", got=repr(code), expected="a code such as HB103", hint=hint)
    return EXPLANATIONS[known]


def _near(code: str) -> list[str]:
    """Up to five codes that may have been meant: near in number, in spelling, or with that word in their message."""
    if number := re.fullmatch(r"(?:HB|NV)?-?(\d{1,9})", code.replace("O", "0")):
        return sorted(sorted(CODES, key=lambda known: abs(int(known[2:]) - int(number[1])))[:3])
    worded = [known for known, (_, message) in CODES.items() if len(code) > 1 and code in message.upper()]
    return (worded or difflib.get_close_matches(code[:99], CODES, 3))[:5]
