"""
Trains agents of a recipe, merging them with all others through a hub. Start it on every rank:

    accelerate launch --config_file launch/accelerate/cpu.yaml launch/train.py --recipe recipes/demo.yaml --agents tool

`ram-trl launch` starts one such job per agent, or as the recipe says; `--dry-run` prints the commands.
"""

import sys

from ram_trl.runs.job import main

if __name__ == "__main__":
    sys.exit(main())
