"""Constitutional AI with Llama-3.2-1B.

TABLE
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
