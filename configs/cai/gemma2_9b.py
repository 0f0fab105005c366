"""Constitutional AI with Gemma-2-9B, by adapters or of all weights, with three judges.

    python -m jaxalign.train --config=configs/cai/gemma2_9b.py:VARIANT --workdir=DIR \
        --config.model.path=FOLDER --config.data.red_team=FILE.jsonl --config.data.helpful=FILE.jsonl

Variants with judge=larger also need --config.judge.path=FOLDER, the folder of Gemma-2-27B, and those with judge=endpoint
--config.endpoint.url=URL. docs/cai_recipes.md explains the variants and has the memory of each stage.

None of the variants has been run. The figures are those of the plan, for the numbers of prompts in common.py: the highest peak
of a device's memory, the hours at 50% of the peak FLOP rate and 80% of the bandwidths, and the cost by the invented prices of
configs/prices_example.json. With judge=endpoint they do not include the server.

| variant | devices | mesh | peak, GB | hours | device hours | cost, USD |
|---|---|---|---|---|---|---|
| lora | v5e:2x4 | tensor 8 | 11.5 of 16.9 | 5.49 | 44.0 | 44 |
| lora,judge=larger | v5e:2x4 | tensor 8 | 11.5 of 16.9 | 7.74 | 61.9 | 62 |
| lora,judge=endpoint | v5e:2x4 | tensor 8 | 11.5 of 16.9 | 4.40 | 35.2 | 35 |
| full | v6e:4x4 | fsdp 4, tensor 4 | 27.4 of 33.5 | 3.93 | 62.9 | 189 |
| full,judge=larger | v6e:4x4 | fsdp 4, tensor 4 | 27.4 of 33.5 | 4.22 | 67.6 | 203 |
| full,judge=endpoint | v6e:4x4 | fsdp 4, tensor 4 | 27.4 of 33.5 | 3.67 | 58.6 | 176 |
"""

import runpy
from pathlib import Path

_common = runpy.run_path(str(Path(__file__).with_name("common.py")))
Layout, cai_config = _common["Layout"], _common["cai_config"]

_LORA, _FULL = Layout(1, 1, 8, 128, 32, 2), Layout(1, 4, 4, 128, 64, 1)
VARIANTS = {
    "lora": _LORA, "lora,judge=larger": _LORA, "lora,judge=endpoint": _LORA,
    "full": _FULL, "full,judge=larger": _FULL, "full,judge=endpoint": _FULL,
}


def get_config(variant="lora"):
    return cai_config(variant, VARIANTS, judge="gemma-2-27b", weights="int8")
