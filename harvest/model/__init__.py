"""From token ids to the residual stream: where a model comes from, its start token, its decoder blocks, and what they hand out."""
