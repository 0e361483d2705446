//! The health that `examples/argo-cd/health.yaml` teaches Argo CD, run by Lua on objects as the operator writes them.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::skipped;
use serde_json::{Value, json};

/// Names under which the language is installed.
const PROGRAMS: [&str; 4] = ["lua5.4", "lua5.3", "lua", "luajit"];

#[test]
fn argo_cd_reads_a_pool_as_flux_does() -> Result<()> {
    let Some(lua) = lua() else {
        skipped("Lua is not installed: Debian's package lua5.4");
        return Ok(());
    };
    let file = std::fs::read_to_string(repository().join("examples/argo-cd/health.yaml"))?;
    let script = script(&file)?;
    for kind in ["PrefillPool", "DecodePool", "RoutePolicy"] {
        let key = format!("resource.customizations.health.serving.baton.dev_{kind}:");
        ensure!(file.contains(&key), "no health of {kind}");
    }
    let status = |observed: i64, conditions: &[(&str, &str, &str)]| {
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(name, status, reason)| json!({"type": name, "status": status, "reason": reason, "message": format!("{reason} it is")}))
            .collect();
        json!({"observedGeneration": observed, "conditions": conditions})
    };
    let rolled_out = [
        ("Ready", "True", "RolledOut"),
        ("Reconciling", "False", "AsDeclared"),
        ("Stalled", "False", "Healthy"),
    ];
    let rolling = [
        ("Ready", "True", "RolledOut"),
        ("Reconciling", "True", "Draining"),
        ("Stalled", "False", "Healthy"),
    ];
    let stalled = [
        ("Ready", "False", "CrashLoop"),
        ("Reconciling", "False", "Stalled"),
        ("Stalled", "True", "CrashLoop"),
    ];
    let paused = [
        ("Ready", "False", "Paused"),
        ("Reconciling", "False", "AsDeclared"),
        ("Stalled", "False", "Healthy"),
    ];
    for (case, status, expected) in [
        ("nobody has looked", Value::Null, "Progressing the operator"),
        ("no condition yet", json!({}), "Progressing the operator"),
        (
            "of an older spec",
            status(2, &rolled_out),
            "Progressing the operator",
        ),
        ("served", status(3, &rolled_out), "Healthy RolledOut it is"),
        (
            "under way",
            status(3, &rolling),
            "Progressing Draining it is",
        ),
        (
            "waits for a human",
            status(3, &stalled),
            "Degraded CrashLoop it is",
        ),
        ("held", status(3, &paused), "Suspended Paused it is"),
        (
            "of another operator",
            status(3, &[]),
            "Progressing no condition",
        ),
    ] {
        let object = json!({"metadata": {"generation": 3}, "status": status});
        let said = run(lua, &script, &object)?;
        ensure!(said.starts_with(expected), "{case}: {said}");
    }
    Ok(())
}

fn lua() -> Option<&'static str> {
    PROGRAMS.into_iter().find(|program| {
        let version = Command::new(program).arg("-v").output();
        version.is_ok_and(|version| version.status.success())
    })
}

/// The text of the one block that all kinds share.
fn script(file: &str) -> Result<String> {
    let (_, rest) = file.split_once("&health |\n").context("no block")?;
    let lines = rest.lines().take_while(|line| line.starts_with("    "));
    Ok(lines.map(|line| format!("{line}\n")).collect())
}

fn run(lua: &str, script: &str, object: &Value) -> Result<String> {
    let program = format!(
        "obj = {}\nlocal health = (function()\n{script}end)()\nprint(health.status .. ' ' .. health.message)\n",
        literal(object)
    );
    let mut child = Command::new(lua)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child
        .stdin
        .take()
        .context("no standard input")?
        .write_all(program.as_bytes())?;
    let output = child.wait_with_output()?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{lua}: {complaint}\n{program}");
    Ok(String::from_utf8(output.stdout)?)
}

/// A value of JSON in Lua, as Argo CD hands it to the script.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => "nil".to_owned(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(literal).collect();
            format!("{{{}}}", items.join(", "))
        }
        Value::Object(members) => {
            let members = members.iter();
            let members: Vec<String> = members
                .map(|(name, value)| format!("[{name:?}] = {}", literal(value)))
                .collect();
            format!("{{{}}}", members.join(", "))
        }
        other => other.to_string(),
    }
}
