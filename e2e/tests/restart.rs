//! A worker that is killed comes back, and the end of `baton up` is the end of everything it started.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::{Fleet, Started};
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::process::{runs, signal_process};
use baton_e2e::{scenario, wait};
use rustix::process::Signal;

const SOON: Duration = Duration::from_secs(60);

#[test]
fn a_killed_worker_comes_back_and_ctrl_c_ends_everything() {
    scenario(async {
        let fleet = Fleet::of(&Manifest {
            decode_replicas: 2,
            ..Manifest::tiny()
        })
        .await?;
        the_table_of_processes_is_true(&fleet)?;
        for mode in ["Aggregated", "Disaggregated"] {
            serve(&fleet, mode).await?;
        }
        for role in ["decode", "prefill", "router"] {
            a_killed_process_comes_back(&fleet, role).await?;
        }
        the_table_of_processes_is_true(&fleet)?;
        fleet.end().await
    });
}

fn the_table_of_processes_is_true(fleet: &Fleet) -> Result<()> {
    let processes = fleet.processes()?;
    let mut roles: Vec<&str> = processes
        .iter()
        .map(|process| process.role.as_str())
        .collect();
    roles.sort_unstable();
    ensure!(
        roles == ["decode", "decode", "prefill", "router"],
        "{processes:?}"
    );
    for process in &processes {
        ensure!(runs(process.pid), "{process:?} does not run");
        ensure!(
            process.address.starts_with("127.0.0.1:"),
            "{process:?} is not on loopback"
        );
    }
    Ok(())
}

async fn serve(fleet: &Fleet, mode: &'static str) -> Result<()> {
    let prompt: Vec<u32> = (3..90).collect();
    let answer = Ask::ids("tiny", &prompt, 4)
        .with("ignore_eos", true)
        .mode(mode)
        .send(&fleet.api)
        .await
        .with_context(|| format!("in {mode}"))?;
    ensure!(answer.output.output_tokens == 4, "{mode}: {answer:?}");
    Ok(())
}

fn one(fleet: &Fleet, role: &str) -> Result<Started> {
    fleet
        .processes()?
        .into_iter()
        .find(|process| process.role == role)
        .with_context(|| format!("no {role} process"))
}

async fn a_killed_process_comes_back(fleet: &Fleet, role: &str) -> Result<()> {
    let before = one(fleet, role)?;
    signal_process(before.pid, Signal::KILL);
    let after = wait::until(&format!("a new {role} process"), SOON, async || {
        let processes = fleet.processes().map_err(|error| error.to_string())?;
        processes
            .iter()
            .find(|process| process.name == before.name && process.pid != before.pid)
            .filter(|process| runs(process.pid))
            .cloned()
            .ok_or_else(|| format!("{processes:?}"))
    })
    .await?;
    ensure!(after.role == before.role, "{after:?} is not as {before:?}");
    // Requests succeed again, in both modes: with the new worker where there is no other.
    for mode in ["Aggregated", "Disaggregated"] {
        wait::until(
            &format!("{mode} serves after {role} was killed"),
            SOON,
            async || {
                serve(fleet, mode)
                    .await
                    .map_err(|error| format!("{error:#}"))
            },
        )
        .await?;
    }
    fleet.idle(SOON).await
}
