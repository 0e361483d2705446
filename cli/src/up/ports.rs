//! Ports of loopback, chosen once, so that a restarted child is found where it was.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use anyhow::Context;

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
        let listener = TcpListener::bind(wanted).map_err(|error| match error.kind() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_one_in_use_is_said() {
        let mut ports = Ports::default();
        let first = ports.free().unwrap();
        let second = ports.free().unwrap();
        assert_ne!(first, second);
        let error = ports.take(first, "--listen").unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{first} is in use: end what listens there or give --listen another port (0 takes a free one)"
            )
        );
    }
}
