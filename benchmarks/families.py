"""Model families: how far each engine is from transformers alone, as the tests measure it.

    python -m benchmarks.families [TEST ...]

Runs the tests that compare tiny models of all families in float32, those of SGLang with real
servers on a CPU (ten minutes), and prints what they recorded. A failed test has no number.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from hybridrl.config.model import MEGATRON_MODEL_TYPES, SGLANG_MODEL_TYPES, TRANSFORMERS_MODEL_TYPES

TESTS = (
    "tests/models/test_packed.py::test_packed_rows_equal_single_rows",
    "tests/workers/train/test_lora.py::test_both_exports_give_the_same_logits_in_peft",
    "tests/workers/rollout/test_hf_sampling.py"
    "::test_logprobs_are_those_of_hugging_face_whatever_the_slots",
    "tests/sglang/test_equality_greedy.py"
    "::test_greedy_tokens_are_those_of_hugging_face_after_each_sync",
    "tests/workers/test_seeing.py::test_packed_rows_with_images_equal_padded_rows_of_transformers",
    "tests/workers/test_seeing.py::test_adapters_equal_those_of_peft_on_padded_rows_of_transformers",
    "tests/workers/test_seeing.py::test_the_embedded_engine_samples_what_the_trainer_scores",
    "tests/sglang/test_vision.py"
    "::test_answers_are_those_of_transformers_for_words_and_several_images",
)
COLUMNS = {
    "packed": "`actor=fsdp2`, nats",
    "gradient": "gradient, of the largest",
    "lora": "LoRA",
    "embedded": "`rollout=hf`, nats",
    "sglang": "`rollout=sglang`, nats",
}


def measured(tests: Sequence[str]) -> dict[str, dict[str, float]]:
    """Run the tests; return the largest number that each recorded, by family and column."""
    largest: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1"]
        command += [f"--junitxml={report}", *tests]
        subprocess.run(command, stdout=sys.stderr, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                continue
            words = case.get("name", "").partition("[")[2].rstrip("]").split("-")
            known = {n.removesuffix("_text"): n for n in TRANSFORMERS_MODEL_TYPES}
            known |= {n: n for n in TRANSFORMERS_MODEL_TYPES}
            families = [known[word] for word in words if word in known]
            for found in case.iter("property"):
                numbers, column = largest[families[0]], found.get("name", "")
                numbers[column] = max(numbers[column], float(found.get("value", "nan")))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="these alone")
    numbers = measured(parser.parse_args().tests)
    rows = []
    for family in sorted(TRANSFORMERS_MODEL_TYPES):
        cells = [f"{numbers[family][c]:.0e}" if c in numbers[family] else "" for c in COLUMNS]
        if family not in SGLANG_MODEL_TYPES:
            cells[-1] = "refused"
        on_megatron = "equal" if family in MEGATRON_MODEL_TYPES else "refused"
        rows.append([f"`{family}`", *cells, on_megatron])
    heads = ["model family", *COLUMNS.values(), "`actor=megatron`"]
    for cells in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
