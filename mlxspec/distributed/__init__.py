"""One model split over several machines by MLX's distributed engine (tensor parallel).

``mlx.launch`` starts the same command once per machine, as ranks 0, 1, and so on. Rank 0, the
leader, works as it would alone: it plans, drafts, samples and prints. Before each forward it sends
the rows to the other ranks, the followers, which run the forward on their own shards of the
weights. Only rank 0 decides anything: the followers know no prompt, no drafter and no sampling.

Inside a forward mlx-lm's sharded layers exchange the values. The leader's messages have separate
TCP connections. So they do not wait behind a running forward, and a rank that dies is noticed at
once, whatever MLX is waiting for.
"""
