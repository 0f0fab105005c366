"""Constitutional AI with Llama-3.2-1B, by adapters or of all weights, with three judges.

    python -m jaxalign.train --config=configs/cai/llama32_1b.py:VARIANT --workdir=DIR \
        --config.model.path=FOLDER --config.data.red_team=FILE.jsonl --config.data.helpful=FILE.jsonl

Variants with judge=larger also need --config.judge.path=FOLDER, the folder of Llama-3.1-8B, and those with judge=endpoint
--config.endpoint.url=URL. docs/cai_recipes.md explains the variants and has the memory of each stage.

None of the variants has been run. The figures are those of the plan, for the numbers of prompts in common.py: the highest peak
of a device's memory, the hours at 50% of the peak FLOP rate and 80% of the bandwidths, and the cost by the invented prices of
configs/prices_example.json. With judge=endpoint they do not include the server.

| variant | devices | mesh | peak, GB | hours | device hours | cost, USD |
|---|---|---|---|---|---|---|
| lora | v5e:1x1 | one device | 7.8 of 16.9 | 3.68 | 3.7 | 4 |
| lora,judge=larger | v5e:1x1 | one device | 15.3 of 16.9 | 13.90 | 13.9 | 14 |
| lora,judge=endpoint | v5e:1x1 | one device | 7.8 of 16.9 | 2.63 | 2.6 | 3 |
| full | v5e:2x4 | fsdp 8 | 8.8 of 16.9 | 1.22 | 9.8 | 10 |
| full,judge=larger | v5e:2x4 | fsdp 8 | 14.1 of 16.9 | 2.45 | 19.6 | 20 |
| full,judge=endpoint | v5e:2x4 | fsdp 8 | 8.8 of 16.9 | 1.06 | 8.5 | 8 |
"""

import runpy
from pathlib import Path

_common = runpy.run_path(str(Path(__file__).with_name("common.py")))
Layout, cai_config = _common["Layout"], _common["cai_config"]

_LORA, _FULL = Layout(1, 1, 1, 64, 32, 2), Layout(1, 8, 1, 128, 128, 1)
VARIANTS = {
    "lora": _LORA, "lora,judge=larger": Layout(1, 1, 1, 64, 8, 2), "lora,judge=endpoint": _LORA,
    "full": _FULL, "full,judge=larger": Layout(1, 8, 1, 128, 64, 1), "full,judge=endpoint": _FULL,
}


def get_config(variant="lora"):
    return cai_config(variant, VARIANTS, judge="Llama-3.1-8B", weights="int8")
