"""branchreplay: exact shared-prefix gradients for RL post-training. Start reading at replay.py."""
