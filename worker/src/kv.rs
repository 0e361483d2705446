//! KV memory of a worker: who owns which block, what it holds, and how it is handed to another worker.

pub mod store;
