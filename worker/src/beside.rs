//! The daemon beside a server of its own: vLLM or SGLang, started by somebody else and called by routers at its own port.
//!
//! - [`start`]: the process. `supervise`: looks for the server, registers each life of its process, follows it. `life`: one of them.
//!   `staging`: the memory of Baton's connector. `service`, `admin`, `metrics`: what is told of it. `shared`: what these share.
//! - `vllm`, `sglang`: what it says of itself (`told`), over `http`. `nixl`: what its connector does, over `sockets`. `folder`: what the model's files do.
//!   `card`: all that as a card. `text`: whether routers make the tokens that it computes with.
//! - [`exposition`]: its metrics. `load`: load reports and fitted costs from them; `unread`: whether
//!   peers have still to read a NIXL server's KV.
//! - [`events`]: what it publishes of its prefix cache. [`index`]: the same under Baton's block hashes. [`follow`]: its batches
//!   without a hole. `listen`: the sockets around them.
//!
//! What holds: the daemon is off the data path; a life ends with the server's process, and with it all that was known of its cache;
//! what cannot be seen and was not declared is unknown.

mod admin;
mod card;
pub mod events;
pub mod exposition;
mod folder;
pub mod follow;
mod http;
pub mod index;
mod life;
mod listen;
mod load;
mod metrics;
mod nixl;
mod service;
mod sglang;
mod shared;
mod sockets;
mod staging;
pub mod start;
mod supervise;
mod text;
mod told;
mod unread;
mod vllm;

#[cfg(test)]
mod frames;
