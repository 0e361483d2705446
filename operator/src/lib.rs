//! Reconciles the three resources of Baton into what a cluster runs.
