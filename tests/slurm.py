"""A Slurm that records what it is given: `sbatch`, `srun`, `scontrol` and `sacct` as small programs in a folder."""

from pathlib import Path

# `sbatch` keeps the script, `srun` runs what follows its options, `sacct` prints what the test wrote.
_PROGRAMS = {
    "sbatch": '[ -e "$here/refusal" ] && { cat "$here/refusal" >&2; exit 1; }\n'
    'cp "$1" "$here/script.sh"\necho "Submitted batch job 4242"',
    "srun": 'echo "$@" > "$here/srun.txt"\n'
    'while [ "${1#--}" != "$1" ]; do case "$1" in --output) out="$2"; shift;; esac; shift; done\n'
    'exec "$@" >> "$(echo "$out" | sed "s/%A/4242/; s/%a/$SLURM_ARRAY_TASK_ID/; s/%j/4242/; s/%t/0/")" 2>&1',
    "scontrol": 'echo "$@" >> "$here/scontrol.txt"',
    "sacct": 'echo "$@" > "$here/sacct.txt"\ncat "$here/states.txt"',
}


def install(folder: Path) -> Path:
    """Write the programs into a folder, which is to be put on PATH."""
    folder.mkdir()
    for name, text in _PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nhere="{folder}"\n{text}\n')
        (folder / name).chmod(0o755)
    return folder
