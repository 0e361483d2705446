//! What Baton's processes say to each other, and the rules that they share.
//!
//! Everything here is a value or a pure function: no I/O, no clock, no Kubernetes.
#[allow(missing_debug_implementations, unreachable_pub, clippy::all, clippy::pedantic, unused_qualifications)]
pub mod wire {
    //! Messages and stubs generated from `proto/worker.proto`.
    tonic::include_proto!("baton.worker.v1");
}
