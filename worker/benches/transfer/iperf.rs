//! The peer: one stream of `iperf3` over loopback, as it comes.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::series::Series;

const RUNS: usize = 3;

/// Received bytes by time, in GB/s; or why there are none.
pub(crate) fn one_stream() -> Result<Series, String> {
    let mut series = Series::default();
    for _ in 0..RUNS {
        series.push(run()?);
    }
    Ok(series)
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It ends by itself after one client; this is for when none came.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run() -> Result<f64, String> {
    let said = |error: std::io::Error| error.to_string();
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(said)?;
    let port = free.local_addr().map_err(said)?.port().to_string();
    drop(free);
    let server = Command::new("iperf3")
        .args(["-s", "-1", "-B", "127.0.0.1", "-p", &port])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("it does not start ({error}): install iperf3"))?;
    let _ended = Ended(server);
    let mut last = String::new();
    // The server says nothing that tells when it listens: asked until it does.
    for _ in 0..40 {
        let client = Command::new("iperf3")
            .args(["-c", "127.0.0.1", "-p", &port, "-t", "2", "-J"])
            .output()
            .map_err(said)?;
        // A client that found nobody may still end well: its report says so instead of naming a rate.
        let rate = serde_json::from_slice::<serde_json::Value>(&client.stdout)
            .ok()
            .and_then(|report| {
                let bits = report.pointer("/end/sum_received/bits_per_second")?;
                bits.as_f64()
            });
        if let Some(bits) = rate {
            return Ok(bits / 8e9);
        }
        last = String::from_utf8_lossy(&client.stdout).into_owned();
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(format!("no run came through: {last}"))
}
