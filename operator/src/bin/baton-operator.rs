//! The operator process.

use std::io::Write as _;
use std::process::ExitCode;

use baton_operator::app::{self, WrongInput, flags::Flags};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let flags = Flags::parse_process();
    let filter = EnvFilter::new(filter(std::env::var("RUST_LOG").ok().as_deref()));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            return end(
                &format!("async runtime: {error}: check the limit on threads"),
                1,
            );
        }
    };
    match runtime.block_on(app::run(flags)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<WrongInput>() => end(&format!("{error:#}"), 2),
        Err(error) => end(&format!("{error:#}"), 1),
    }
}

/// Directives of the log, given those of the environment. The client tells of each try, as an error or not, and what comes of it is said
/// by whoever asked: it is heard only when it is named.
fn filter(asked: Option<&str>) -> String {
    let asked = asked.filter(|asked| !asked.is_empty()).unwrap_or("info");
    if asked.contains("kube") {
        asked.to_owned()
    } else {
        format!("{asked},kube_client=off,kube_runtime=off")
    }
}

fn end(message: &str, status: u8) -> ExitCode {
    // Without standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "baton-operator: {message}");
    ExitCode::from(status)
}
