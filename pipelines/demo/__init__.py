"""The built-in text-to-image model: a stock diffusers pipeline small enough to ship."""
