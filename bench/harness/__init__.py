"""What `bench/run` is made of.

A load is one module: `SUMMARY`, `add_options(parser)`, and `run(stage, report, options)`, which asks the stage for
the servers it needs, measures, hands each measurement to the report and returns whether nothing was lost. `LOADS` is
the list; another source or sink joins it here. The instruments are a Rust program, bench/measure.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# The servers of the tests are the servers of the benches, differently tuned.
sys.path.insert(0, str(REPOSITORY / "tests"))

from . import confirm, mongodb, mysql, poll, postgres, sinks  # noqa: E402

LOADS = {"postgres": postgres, "mysql": mysql, "mongodb": mongodb, "poll": poll, "sinks": sinks, "confirm": confirm}
