"""Constitutional AI with Llama-3.1-8B, by adapters or of all weights, with three judges.

    python -m jaxalign.train --config=configs/cai/llama31_8b.py:VARIANT --workdir=DIR \
        --config.model.path=FOLDER --config.data.red_team=FILE.jsonl --config.data.helpful=FILE.jsonl

Variants with judge=larger also need --config.judge.path=FOLDER, the folder of Llama-3.1-70B, and those with judge=endpoint
--config.endpoint.url=URL. docs/cai_recipes.md explains the variants and has the memory of each stage.

None of the variants has been run. The figures are those of the plan, for the numbers of prompts in common.py: the highest peak
of a device's memory, the hours at 50% of the peak FLOP rate and 80% of the bandwidths, and the cost by the invented prices of
configs/prices_example.json. With judge=endpoint they do not include the server.

| variant | devices | mesh | peak, GB | hours | device hours | cost, USD |
|---|---|---|---|---|---|---|
| lora | v5e:4x4 | data 4, tensor 4 | 6.9 of 16.9 | 2.49 | 39.8 | 40 |
| lora,judge=larger | v5e:4x4 | data 2, tensor 8 | 13.9 of 16.9 | 6.96 | 111.3 | 111 |
| lora,judge=endpoint | v5e:4x4 | data 4, tensor 4 | 6.9 of 16.9 | 1.94 | 31.0 | 31 |
| full | v6e:8x8 | fsdp 16, tensor 4 | 8.8 of 33.5 | 0.67 | 42.7 | 128 |
| full,judge=larger | v6e:8x8 | fsdp 16, tensor 4 | 24.5 of 33.5 | 1.05 | 67.0 | 201 |
| full,judge=endpoint | v6e:8x8 | fsdp 16, tensor 4 | 8.8 of 33.5 | 0.58 | 37.4 | 112 |
"""

import runpy
from pathlib import Path

_common = runpy.run_path(str(Path(__file__).with_name("common.py")))
Layout, cai_config = _common["Layout"], _common["cai_config"]

_LORA, _FULL = Layout(4, 1, 4, 128, 64, 4), Layout(1, 16, 4, 128, 128, 1)
VARIANTS = {
    "lora": _LORA, "lora,judge=larger": Layout(2, 1, 8, 128, 32, 4), "lora,judge=endpoint": _LORA,
    "full": _FULL, "full,judge=larger": _FULL, "full,judge=endpoint": _FULL,
}


def get_config(variant="lora"):
    return cai_config(variant, VARIANTS, judge="Llama-3.1-70B", weights="int8")
