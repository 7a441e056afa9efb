"""Words that are gone from kvferry's code and pages, each with what to say instead. `scripts/check` runs it.

Prints each place that has one and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

GONE = {
    r"\b[Aa]skers?\b": "client id",
    r"\b[Tt]ickets?\b": "request number",
    r"\bstruct Want\b|\bWant \{": "request record",
    r"\b[Dd]esk\b": "RequestHandler",
    r"\b(struct|impl|trait|enum) Gate\b|\bGate::": "AuthLayer",
    r"(?<![A-Za-z])[Pp]ortions?\b|_portions?\b|\bportion_|Portion": "chunk",
    r"\b[Rr]ehears\w*|REHEARSE": "warm-up",
    r"\b(block_)?[Mm]eeting\b": "block grid",
    r"\bPrefillNews\b": "PrefillProgress",
    r"\b(such|further) lines left out\b": "similar lines suppressed",
    r"\b[Ll](?:et|ets|etting) go of\b": "evict, release",
    r"\b(?:is|are|was|were) looked (?:for|after)\b": "is searched, is handled",
    r"\bpassengers?\b|\bsidestep\w*": "driver, thread affinity",
}
"""Regular expressions of what is gone."""

ELSEWHERE = (
    ":!python/kvferry/vllm",
    ":!python/kvferry/bench",
    ":!tests/python",
    ":!tests/gpu",
    ":!tests/cuda_double",
    ":!docs/*.svg",
)
"""Parts whose words are not checked."""

ALLOWED = (
    ("CHANGELOG.md", r"portion_tokens|rehearse|`portion`"),
    ("docs/upgrading.md", r"portion_tokens|PORTION_TOKENS|rehearse|REHEARSE"),
    ("scripts/lib/words.py", r""),
    ("src/settings/parse.rs", r"rehearse|REHEARSE"),
    ("src/settings/table.rs", r'renamed\("'),
    ("python/kvferry/trace.py", r"FORMER"),
)
"""Lines that name what was, such as a key that is still accepted: a file and what such a line has."""


def found() -> list[str]:
    """Each line with a word that is gone."""
    command = ["git", "grep", "-nIP", "|".join(GONE), "--", "*.rs", "*.py", "*.h", "*.c", "*.cpp", "*.md", "scripts"]
    done = subprocess.run([*command, *ELSEWHERE], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        sys.exit(done.stderr)
    lines = []
    for line in done.stdout.splitlines():
        path, number, text = line.split(":", 2)
        if any(path == allowed and re.search(known, text) for allowed, known in ALLOWED):
            continue
        for word, instead in GONE.items():
            if match := re.search(word, text):
                lines.append(f"{path}:{number}: {match.group()!r}; say {instead}")
    return lines


if __name__ == "__main__":
    sys.exit("\n".join(found()) or 0)
