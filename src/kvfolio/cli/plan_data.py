"""Plans as JSON and CSV: the stable keys are the field names of ``planner.report``.

Knows nothing of terminals.
"""

import csv
import dataclasses
import json
from collections.abc import Sequence
from typing import TextIO

from kvfolio.planner.report import Plan
from kvfolio.planner.whatif import WhatIf

_COLUMNS = (
    *("model", "context", "beyond_model", "bytes", "naive_bytes", "kvfolio_bytes", "reserved_vllm_bytes", "users"),
    *("tokens_per_s_per_user", "tokens_per_s_total_full", "ttft_s", "bytes_per_token", "bytes_fixed"),
    *("weights_bytes", "kv_memory_bytes", "device", "num_devices", "kv_format"),
)


def as_json_text(plans: Sequence[Plan]) -> str:
    """A list with one object a model."""
    return json.dumps([dataclasses.asdict(plan) for plan in plans], ensure_ascii=False, allow_nan=False)


def ladders_as_json(ladders: Sequence[Sequence[WhatIf]]) -> str:
    """A list with one object a model: its name and its rows."""
    return json.dumps(
        [
            {
                "model": ladder[0].plan.model.name,
                "rows": [{"name": row.name, "ratio": row.ratio} | dataclasses.asdict(row.plan) for row in ladder],
            }
            for ladder in ladders
        ],
        ensure_ascii=False,
    )


def write_csv(plans: Sequence[Plan], out: TextIO) -> None:
    """One row a model and context, plain integers of bytes and seconds."""
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(_COLUMNS)
    for plan in plans:
        kv = plan.kv
        for row in plan.contexts:
            key = str(row.context)
            rows.writerow(
                [
                    plan.model.name,
                    row.context,
                    int(row.beyond_model),
                    row.bytes,
                    kv.naive_bytes_at[key],
                    kv.kvfolio_bytes_at[key],
                    kv.reserved_vllm_bytes_at[key],
                    row.users,
                    row.step and row.step.tokens_per_s_per_user,
                    row.full_step and row.full_step.tokens_per_s_total,
                    row.ttft_s,
                    kv.bytes_per_token,
                    kv.bytes_fixed,
                    plan.weights_bytes,
                    plan.kv_memory_bytes,
                    plan.device.name,
                    plan.device.num_devices,
                    kv.format,
                ]
            )
