//! Kernels: the arithmetic of the Builtin engine on one thread of the host's processor.
//!
//! - [`Host`]: which instruction set computes. Found once at run time; every operation is a method of it.
//! - [`Matrix`]: quantised weights; [`Activations`]: quantised rows that they are multiplied with.
//! - `lanes`: sixteen numbers at once, one file for each instruction set. Everything else is written once, over `lanes`.
//!
//! **The invariant of this crate: a result does not depend on the instruction set, nor on which rows or queries are computed
//! together.** Workers of one pool may have different processors, and their KV is mixed. It holds because integer dot products
//! are exact, and because every floating-point number is a chain of correctly rounded operations whose order is written down here once: a
//! lane never meets another lane but in [`fold`](lanes), which has a fixed order too. The tests compare bits of all paths
//! that the processor at hand can run.
//!
//! `unsafe` is in `lanes/avx512.rs` and in [`Host`]'s one call into it, and nowhere else.

mod activations;
mod attention;
mod exponential;
mod host;
mod lanes;
mod matrix;
mod product;
mod rows;
mod weights;

pub use activations::Activations;
pub use attention::{WIDEST_GROUP, Weighing};
pub use host::Host;
pub use matrix::Matrix;
pub use weights::BLOCK;

/// Numbers that are computed side by side: rows of a weight tile, tokens of a key tile, dimensions of a value panel.
pub const LANES: usize = 16;
