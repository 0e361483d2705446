//! A whole deployment in a simulated network, by seed: the real router and workers, under partitions, losses, crashes and clocks that
//! do not agree.
//!
//! Every process is a host of [`turmoil`]: it runs its production code on a paused clock, over sockets whose bytes this test
//! delivers, delays and loses. Engines take the time that their cost model says. All chance is drawn from the seed, so that a
//! seed that fails fails again.
//!
//! - [`plan`]: what a seed means: fleet, requests, faults. Pure. [`bank`]: what is asked, and the answers to compare with.
//! - [`sockets`], [`machine`]: what the hosts get instead of a machine. [`hosts`]: router and workers.
//! - [`client`]: what a client sees. [`scene`]: one seed played to its end. [`seeds`]: many, each in a process of
//!   its own. [`checks`], [`records`]: what must hold then.
//!
//! What is not simulated: a worker's process is never frozen (its network is), disks never fail, and TCP does not send again what
//! was lost, so that a lost segment is a connection that hangs until somebody notices. That is harsher than a real network.

pub mod bank;
pub mod checks;
pub mod client;
pub mod hosts;
pub mod machine;
pub mod plan;
pub mod records;
pub mod scene;
pub mod seeds;
pub mod sockets;

/// Ports of every host.
pub mod ports {
    pub const API: u16 = 8000;
    pub const ROUTER_ADMIN: u16 = 8001;
    pub const CONTROL: u16 = 7000;
    pub const TRANSFER: u16 = 7001;
    pub const WORKER_ADMIN: u16 = 7002;
}

/// Name of the router's host.
pub const ROUTER: &str = "router";
/// Name of the host of all clients.
pub const CLIENTS: &str = "clients";
