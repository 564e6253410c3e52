"""One model split over several machines by MLX's distributed engine (tensor parallel).

``mlx.launch`` starts the same command once per machine, as ranks 0, 1, and so on. Rank 0, the
leader, does everything that it would do alone: it drafts, chooses, plans and prints. Before it
runs a forward it sends it to the others, the followers, which run it on their own shard
of the weights. So only rank 0 ever decides anything: a follower knows no prompt, no drafter and
no sampling.

The values inside a forward travel as ``mlx-lm``'s sharded layers send them. The leader's messages
have TCP connections of their own: they do not queue up behind a forward that is under way, and a
rank that dies is noticed at once, whatever MLX is waiting for.
"""
