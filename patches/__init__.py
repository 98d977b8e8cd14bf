"""Installs the engine on diffusers and transformers objects, and takes it off again."""
