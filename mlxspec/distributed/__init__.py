"""One model split over several machines by MLX's distributed engine (tensor parallel).

``mlx.launch`` starts the same command once per machine, as ranks 0, 1, and so on. Rank 0, the
leader, does everything that it would do alone: it drafts, chooses, plans, prints. Whenever it
runs a forward, it tells the others first, and these, the followers, run the same forward on
their shard of the weights. So nothing but rank 0 ever decides anything, and a follower knows no
prompt, no drafter and no sampling.

The values inside a forward travel as ``mlx-lm``'s sharded layers send them. What the leader tells
goes over TCP connections of its own: it then does not queue up behind the forward that is on its
way, and a rank that dies is noticed at once, whatever MLX is waiting for.
"""
