//! `kubectl proxy`: the API server as plain HTTP on a port of loopback, with the rights of a kubeconfig.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::kubectl::Kubectl;

/// An API server that is busy takes seconds; one that says nothing for so long is away.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// It runs for as long as the value lives.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    process: Child,
    /// Open for as long as it may say something.
    _said: BufReader<ChildStdout>,
}

impl Proxy {
    /// Starts it on a free port.
    ///
    /// # Errors
    /// There is no kubectl, or it says no address.
    pub(super) fn start(kubectl: &Kubectl) -> Result<Self> {
        let mut process = kubectl
            .command(&["proxy", "--port=0"])
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        let mut said = BufReader::new(process.stdout.take().context("no output of kubectl")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let address = line.split_whitespace().last().map(str::parse);
        let Some(Ok(address)) = address else {
            process.kill()?;
            process.wait()?;
            bail!("kubectl proxy says {line:?}");
        };
        Ok(Self {
            address,
            process,
            _said: said,
        })
    }

    /// An object or a list, as JSON: what a kubectl that is started for it would read, for a hundredth of the work.
    ///
    /// # Errors
    /// Another answer than 200, or none.
    pub(super) fn get(&self, path: &str) -> Result<Value> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        // The older version, whose answers end with the connection and are in one piece.
        write!(stream, "GET {path} HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("half an answer")?;
        let status = head.split(' ').nth(1);
        ensure!(status == Some("200"), "GET {path}: {head}: {body}");
        Ok(serde_json::from_str(body)?)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
