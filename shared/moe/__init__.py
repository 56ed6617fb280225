"""Chapter 09. Mixture of experts (MoE): router, balance losses, dispatch, experts, and the formats of published models."""
