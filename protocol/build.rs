//! Compiles `proto/worker.proto` with a pure-Rust compiler: no `protoc` has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/worker.proto");
    let descriptors = protox::compile(["proto/worker.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
