//! Ports of loopback, chosen once, so that a restarted child is found where it was.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use anyhow::Context;

/// Where ports are looked for: above what services of a machine have, below what this kernel gives to connections that go out. One of
/// those could have a child's port while the child is down.
const LEAST: u16 = 10_000;
const MOST: u16 = 30_000;
const FEWEST: u16 = 1_000;
/// Draws before the kernel is asked.
const DRAWS: usize = 64;

/// Holds the ports that were chosen until all are, so that none is given twice.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    held: Vec<TcpListener>,
}

impl Ports {
    /// A free port of loopback.
    pub(crate) fn free(&mut self) -> anyhow::Result<SocketAddr> {
        self.take(
            SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            "a worker",
        )
    }

    /// The address as asked for, with port 0 made a free one.
    ///
    /// # Errors
    /// It cannot be listened on; `flag` is what to change then.
    pub(crate) fn take(&mut self, wanted: SocketAddr, flag: &str) -> anyhow::Result<SocketAddr> {
        let drawn = if wanted.port() == 0 && wanted.ip().is_loopback() {
            drawn(wanted.ip())?
        } else {
            None
        };
        let bound = drawn.map_or_else(|| TcpListener::bind(wanted), Ok);
        let listener = bound.map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                anyhow::anyhow!("{wanted} is in use: end what listens there or give {flag} another port (0 takes a free one)")
            }
            _ => anyhow::anyhow!("cannot listen on {wanted}: {error}; give {flag} another address"),
        })?;
        let address = listener.local_addr().context("a listener has an address")?;
        self.held.push(listener);
        Ok(address)
    }
}

/// A port that no connection is given; none where there are too few.
fn drawn(address: IpAddr) -> anyhow::Result<Option<TcpListener>> {
    let Some(places) = MOST.min(first_of_connections()).checked_sub(LEAST) else {
        return Ok(None);
    };
    if places < FEWEST {
        return Ok(None);
    }
    for _ in 0..DRAWS {
        let drawn = getrandom::u32().context("no random number for a port")?;
        let place = u16::try_from(drawn % u32::from(places))?;
        if let Ok(listener) = TcpListener::bind(SocketAddr::new(address, LEAST + place)) {
            return Ok(Some(listener));
        }
    }
    Ok(None)
}

/// The first port that the kernel gives to whoever asks for any. Where it does not say, what most have.
fn first_of_connections() -> u16 {
    const USUAL: u16 = 32_768;
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|range| range.split_whitespace().next()?.parse().ok())
        .unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_one_in_use_is_said() {
        let mut ports = Ports::default();
        let first = ports.free().unwrap();
        let second = ports.free().unwrap();
        assert_ne!(first, second);
        let outgoing = first_of_connections();
        for port in [first.port(), second.port()] {
            assert!(port < outgoing || outgoing < LEAST + FEWEST, "{port}");
        }
        let error = ports.take(first, "--listen").unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{first} is in use: end what listens there or give --listen another port (0 takes a free one)"
            )
        );
    }
}
