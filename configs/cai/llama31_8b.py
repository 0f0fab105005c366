"""Constitutional AI with Llama-3.1-8B.

TABLE
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
