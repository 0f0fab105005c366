"""Constitutional AI with Qwen3-0.6B, by adapters or of all weights, with three judges.

    python -m jaxalign.train --config=configs/cai/qwen3_0_6b.py:VARIANT --workdir=DIR \
        --config.model.path=FOLDER --config.data.red_team=FILE.jsonl --config.data.helpful=FILE.jsonl

Variants with judge=larger also need --config.judge.path=FOLDER, the folder of Qwen3-8B, and those with judge=endpoint
--config.endpoint.url=URL. docs/cai_recipes.md explains the variants and has the memory of each stage.

None of the variants has been run. The figures are those of the plan, for the numbers of prompts in common.py: the highest peak
of a device's memory, the hours at 50% of the peak FLOP rate and 80% of the bandwidths, and the cost by the invented prices of
configs/prices_example.json. With judge=endpoint they do not include the server.

| variant | devices | mesh | peak, GB | hours | device hours | cost, USD |
|---|---|---|---|---|---|---|
| lora | v5e:1x1 | one device | 7.2 of 16.9 | 2.26 | 2.3 | 2 |
| lora,judge=larger | v5e:1x1 | one device | 14.6 of 16.9 | 12.38 | 12.4 | 12 |
| lora,judge=endpoint | v5e:1x1 | one device | 7.2 of 16.9 | 1.32 | 1.3 | 1 |
| full | v5e:2x4 | fsdp 8 | 6.4 of 16.9 | 0.60 | 4.8 | 5 |
| full,judge=larger | v5e:2x4 | fsdp 8 | 14.6 of 16.9 | 1.82 | 14.6 | 15 |
| full,judge=endpoint | v5e:2x4 | fsdp 8 | 6.4 of 16.9 | 0.45 | 3.6 | 4 |
"""

import runpy
from pathlib import Path

_common = runpy.run_path(str(Path(__file__).with_name("common.py")))
Layout, cai_config = _common["Layout"], _common["cai_config"]

_LORA, _FULL = Layout(1, 1, 1, 32, 16, 2), Layout(1, 8, 1, 128, 64, 2)
VARIANTS = {
    "lora": _LORA, "lora,judge=larger": Layout(1, 1, 1, 32, 8, 2), "lora,judge=endpoint": _LORA,
    "full": _FULL, "full,judge=larger": _FULL, "full,judge=endpoint": _FULL,
}


def get_config(variant="lora"):
    config = cai_config(variant, VARIANTS, judge="Qwen3-8B", weights="int8")
    config.data.thinking = config.feedback.thinking = "off"  # Thoughts would exceed the lengths of answers and critiques.
    return config
