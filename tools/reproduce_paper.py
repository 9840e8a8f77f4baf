"""The PagedAttention paper's figures from our own Scheduler and BlockManager, beside the paper's numbers.

No model runs: the executor is simulated over a linear model of OPT-13B on an A100 (paper_machine), lengths
and arrivals are drawn anew (paper_workload; the lengths' sigma was fixed before the first run), and what the
paper compares with is written anew (paper_reference). Seeds are fixed; nothing is fitted to the paper.

    python -m tools.reproduce_paper [--plots docs]

The last line is JSON: the tables. --plots needs matplotlib: pip install '.[plots]'.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.paper_figures import Figures
from tools.paper_paged import simulate
from tools.paper_table import Sizes


def main() -> None:
    """Print all tables, draw the plots if asked, and print the tables as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the figures there, as PNGs")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        figures = Figures(lambda case: pool.submit(simulate, case), Sizes())
        tables = figures.tables()
        print(*tables, sep="\n")
        if args.plots is not None:
            from tools.paper_plots import draw

            draw(figures, args.plots)
    print(json.dumps({"reproduce_paper": [table._asdict() for table in tables]}))


if __name__ == "__main__":
    main()
