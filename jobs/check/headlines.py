"""The figures of the repository's first page, each from its newest record.

``python jobs/check/results.py`` writes the table into README.md. A line names the figures that it shows; one of them
that no record has is an error, so that nothing is claimed without a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["HEADLINES", "Headline", "headline_rows"]


class Headline(NamedTuple):
    """A line of the table.

    Attributes:
        what: was measured, in words.
        record: its name in docs/results.
        text: with a figure's name in braces for each figure.
    """

    what: str
    record: str
    text: str


HEADLINES: Sequence[Headline] = (
    Headline(
        "a step on emulated accelerators over an ideal one; 2, 4 and 8 stages",
        "runtime",
        "{overhead_s2_m8}, {overhead_s4_m16}, {overhead_s8_m32}; torch's runtime {torch_overhead_s2_m8}, "
        "{torch_overhead_s4_m16}, {torch_overhead_s8_m32}",
    ),
    Headline(
        "torch's step over ours, two emulated stages on a link of 1000, 100, 50 and 25 Mbit/s, nothing lost",
        "links-emulated",
        "{vs_torch_1f1b_1000mbit_emulated}, {vs_torch_1f1b_100mbit_emulated}, {vs_torch_1f1b_50mbit_emulated}, "
        "{vs_torch_1f1b_25mbit_emulated} of its 1F1B; {vs_torch_best_1000mbit_emulated}, "
        "{vs_torch_best_100mbit_emulated}, {vs_torch_best_50mbit_emulated}, {vs_torch_best_25mbit_emulated} of its "
        "best schedule",
    ),
    Headline(
        "the same where the stages compute and no processor is left over",
        "links",
        "{vs_torch_1f1b_1000mbit}, {vs_torch_1f1b_100mbit}, {vs_torch_1f1b_50mbit}, {vs_torch_1f1b_25mbit} of its "
        "1F1B; {vs_torch_best_1000mbit}, {vs_torch_best_100mbit}, {vs_torch_best_50mbit}, {vs_torch_best_25mbit} of "
        "its best schedule",
    ),
    Headline("emulated stages at 25 Mbit/s, with codecs", "links-emulated", "{vs_torch_1f1b_25mbit_codec_emulated}"),
    Headline(
        "processor time of one stage over plain PyTorch, short operations: a GPT, GPT-2 with dropout, ResNet-18",
        "host",
        "{executor_over_plain_gpt_fp32}, {executor_over_plain_gpt2_fp32}, {executor_over_plain_resnet18_fp32}; under "
        "autocast {executor_over_plain_gpt_bf16_autocast}, {executor_over_plain_gpt2_bf16_autocast}, "
        "{executor_over_plain_resnet18_bf16_autocast}",
    ),
    Headline(
        "a link that changes while it trains: fixed 1F1B over ours, and ours over an oracle",
        "adaptive",
        "{a_vs_static_1f1b}, {a_vs_oracle}",
    ),
    Headline(
        "contended links, light to heavy, four stages: 1F1B over kFkB with Ada-Grouper",
        "contention",
        "{contention_light_s4}, {contention_moderate_s4}, {contention_heavy_s4}",
    ),
    Headline(
        "time to a fixed loss with Muon, four emulated devices, links without latency and of 100 ms: 1F1B over 2bw "
        "with predicted weights",
        "time_to_loss",
        "{times_1f1b_2bw_0ms}, {times_1f1b_2bw_100ms}",
    ),
    Headline(
        "a bounded ring of weight versions over stashing them all: memory of stage 0, and time of a step",
        "memory",
        "{ring_vs_stash_sgd}, {ring_vs_stash_step}",
    ),
    Headline(
        "Lv et al.'s bounded weights, encoded links and cut together: the step of GPipe and of PipeDream over it",
        "lv",
        "{time_vs_gpipe}, {time_vs_pipedream}",
    ),
    Headline(
        "a model of many parameters on 2, 4 and 8 emulated workers at 200 Mbit/s: DDP's time to an accuracy over that "
        "of our plan",
        "vs_dp",
        "{time_to_accuracy_parameters_2w_200mbit}, {time_to_accuracy_parameters_4w_200mbit}, "
        "{time_to_accuracy_parameters_8w_200mbit}",
    ),
    Headline(
        "a stage of 10 and of 96 MB is killed beside a warm spare: seconds until a new step is done; nothing is lost",
        "recovery",
        "{sigkill_seconds_warm_10mb}, {sigkill_seconds_warm_96mb}",
    ),
    Headline(
        "on an H200, kernels of the codecs over a copy there, by bytes per second: bf16, int8, fp8, int4",
        "codec",
        "{fraction_of_copy_bf16}, {fraction_of_copy_int8}, {fraction_of_copy_fp8}, {fraction_of_copy_int4}",
    ),
    Headline(
        "half a day of real spot interruptions, computed: share of its steps that a run keeps, and one that restarts",
        "spot",
        "{goodput_elastic_1x} and {goodput_restarted_1x}; at a hundred times the rate {goodput_elastic_100x} and "
        "{goodput_restarted_100x}",
    ),
    Headline(
        "a process of one step on two workers, over Ray's TorchTrainer: a small net, ResNet-50, GPT-2 small",
        "first_step",
        "{cold_readme}, {cold_resnet50}, {cold_gpt2}",
    ),
)


def headline_rows(kept: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Build a row for each headline: title, figures, and the record with its machine's name.

    Args:
        kept: records by name.

    Raises:
        KeyError: a figure that no run of its record has.
    """
    rows = []
    for line in HEADLINES:
        figures: dict[str, str] = {}
        for run in reversed(kept[line.record]["runs"]):  # the newest last, whose figures count
            figures |= {name: f"{value:.4g}" for name, value in run["figures"].items()}
        rows.append([line.what, line.text.format_map(figures), f"[{line.record}](docs/results/{line.record}.md)"])
    return rows
