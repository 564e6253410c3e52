"""Show the cost of steps on this machine, and which drafts pay: python calibrate.py [MODEL].

Costs begin with typical ones, and every step of a generation corrects them. mlxspec calibrate
measures them all at once.
"""

import sys

from mlxspec import AutoDecoder

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
decoder = AutoDecoder(model)
curve = decoder.costs.curve

print(f"{'drafted':>8} {'cost of the step':>17} {'tokens, if each is right with 80 %':>36}")
for drafted in (1, 2, 4, 8, 16):
    cost = curve(1 + drafted)  # in plain steps of one row
    tokens = sum(0.8**depth for depth in range(drafted + 1))
    print(f"{drafted:8} {cost:17.2f} {tokens:29.2f} {'pays' if tokens > cost else '-':>6}")
