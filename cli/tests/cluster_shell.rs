//! A shell whose environment says where a cluster's router is, as `make cluster-env` does.

use std::net::TcpListener;
use std::process::Command;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/tiny.yaml");

/// Status and standard error of `baton`, with these variables.
fn baton(variables: &[(&str, &str)], arguments: &[&str]) -> std::io::Result<(Option<i32>, String)> {
    let folder = tempfile::tempdir()?;
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .current_dir(folder.path())
        .env_clear()
        .env("HOME", folder.path())
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .envs(variables.iter().copied())
        .output()?;
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output.status.code(), words))
}

#[test]
fn up_listens_on_an_address_of_the_environment_and_takes_a_url_there_for_somebody_elses() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let url = format!("http://{address}");

    // What is read after the arguments is what it fails by.
    let up = ["up", "-f", TINY, "--listen", &address];
    let (status, words) = baton(&[("BATON_ADMIN", &url)], &up).unwrap();
    assert_eq!(status, Some(1), "{words}");
    assert!(
        words.starts_with(&format!("error: {address} is in use"))
            && words.contains("give --listen another port"),
        "{words}"
    );

    let up = ["up", "-f", TINY, "--listen", "127.0.0.1:0"];
    let (status, words) = baton(&[("BATON_ADMIN", &address)], &up).unwrap();
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("give --admin another port"), "{words}");

    let said = [&up[..], &["--admin", &url]].concat();
    let (status, words) = baton(&[("BATON_ADMIN", &url)], &said).unwrap();
    assert_eq!(status, Some(2), "who says it means it: {words}");
    assert!(words.contains("'--admin <ADDRESS>'"), "{words}");
}

#[test]
fn the_other_commands_ask_the_router_that_the_environment_names() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let url = format!("http://{}", free.unwrap());
    let nobody = format!("no router answers at {url}");
    for (variable, arguments) in [
        ("BATON_ROUTER", &["ask", "hello"][..]),
        ("BATON_ADMIN", &["explain", "r0-1"]),
        ("BATON_ADMIN", &["replay"]),
        ("BATON_ADMIN", &["top"]),
    ] {
        let (status, words) = baton(&[(variable, &url)], arguments).unwrap();
        assert_eq!(status, Some(1), "{arguments:?}: {words}");
        assert!(words.contains(&nobody), "{arguments:?}: {words}");
    }
}
