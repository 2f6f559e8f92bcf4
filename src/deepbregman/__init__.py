"""Deep Bregman divergences for contrastive learning of visual representations."""
