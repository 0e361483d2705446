//! The planner, by what it answers to pools, pods and workers that are built here.

mod disruption;
mod drain;
mod engine;
mod histories;
mod lacking;
mod pending;
mod registration;
mod render;
mod revision;
mod scene;
mod status;
mod steps;
