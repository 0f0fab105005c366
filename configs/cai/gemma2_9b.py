"""Constitutional AI with Gemma-2-9B.

TABLE
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
