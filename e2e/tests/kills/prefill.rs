//! The prefill worker is killed under a run, at moments that its own progress tells.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use baton_e2e::disaster::Killed;
use baton_e2e::fleet::{Fleet, Started};
use baton_e2e::openai::Output;
use baton_e2e::record::Record;
use baton_protocol::lifecycle::State;

use super::{
    SETTLED, SHM, TCP, ask, computed, frozen_reader, in_time, manifest, moved_over, one_more,
    reference, runs_in,
};

/// `baton up` doubles its wait before it starts a process anew, from half a second on: after so many kills another fleet is there sooner.
const KILLS_OF_A_FLEET: usize = 4;

/// When the prefill worker is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// So many steps are computed, and the next one is under way.
    Computed(u32),
    /// All is computed and published, and its reader has not read all of it.
    Published,
}
use Moment::{Computed, Published};

impl Moment {
    fn name(self) -> String {
        match self {
            Computed(steps) => format!("computed-{steps}"),
            Published => "published".to_owned(),
        }
    }
}

/// What kills came to.
#[derive(Debug, Default)]
struct Kills {
    expected: Option<Output>,
    /// That the run noticed.
    disturbed: usize,
    /// States that such runs had been in.
    reached: BTreeSet<State>,
    /// Tokens that were left to compute, at each moment of computing.
    left: Vec<f64>,
}

/// Kills the prefill worker; also who it was, and how many tokens it had left.
async fn kill_at(fleet: &Fleet, moment: Moment) -> Result<(Started, Option<f64>, Killed)> {
    let (worker, left, frozen) = match moment {
        Computed(steps) => {
            let (worker, left) = computed(fleet, steps).await?;
            (worker, Some(left), None)
        }
        Published => {
            let before = runs_in(fleet, State::KvPublished).await?;
            let (worker, frozen) = frozen_reader(fleet).await?;
            one_more(fleet, State::KvPublished, before).await?;
            (worker, None, Some(frozen))
        }
    };
    let killed = fleet.kill(worker.clone()).await?;
    drop(frozen);
    Ok((worker, left, killed))
}

/// Kills prefill workers of one fleet, one run at a time.
async fn prefill_kills(over: &str, moments: &[Moment], kills: &mut Kills) -> Result<()> {
    let fleet = Fleet::of(&manifest(over)).await?;
    if kills.expected.is_none() {
        let expected = reference(&fleet).await?;
        let undisturbed = in_time(&fleet, &ask("Disaggregated", "undisturbed")).await?;
        ensure!(undisturbed.output == expected, "{:?}", undisturbed.output);
        let record = Record::of(&fleet.admin, &undisturbed.run).await?;
        ensure!(record.kind()? == "Remote", "not remote: {}", record.0);
        ensure!(record.bytes() > 0, "nothing was moved: {}", record.0);
        moved_over(&record, over)?;
        fleet.idle(SETTLED).await?;
        kills.expected = Some(expected);
    }
    for moment in moments {
        let request = ask("Disaggregated", &moment.name());
        let (answer, killed) = tokio::join!(in_time(&fleet, &request), kill_at(&fleet, *moment));
        let answer = answer.with_context(|| format!("killed at {moment:?}"))?;
        let (worker, left, killed) = killed?;
        ensure!(
            Some(&answer.output) == kills.expected.as_ref(),
            "killed at {moment:?}: {:?} instead of {:?}",
            answer.output,
            kills.expected
        );
        let record = Record::of(&fleet.admin, &answer.run).await?;
        record.check_order()?;
        ensure!(record.kind()? == "Remote", "not remote: {}", record.0);
        moved_over(&record, over)?;
        // A run that was over before the kill shows nothing.
        if record.attempts()? > 1 {
            fleet
                .lost(&record, &worker)
                .with_context(|| format!("killed at {moment:?}"))?;
            kills.disturbed += 1;
            kills.reached.extend(record.first_attempt()?);
        }
        kills.left.extend(left);
        fleet.back(&killed).await?;
        fleet.idle(SETTLED).await?;
    }
    fleet.end().await
}

/// Kills at all of these moments, and checks that they were as many and met the runs.
async fn kills_at(over: &str, moments: &[Moment]) -> Result<()> {
    let mut kills = Kills::default();
    for some in moments.chunks(KILLS_OF_A_FLEET) {
        Box::pin(prefill_kills(over, some, &mut kills)).await?;
    }
    let Kills {
        disturbed,
        reached,
        mut left,
        ..
    } = kills;
    ensure!(
        disturbed + 1 >= moments.len(),
        "of {} kills {disturbed} met the run",
        moments.len()
    );
    for state in [
        State::PrefillStarted,
        State::KvTransferStarted,
        State::PrefillCompleted,
        State::KvPublished,
    ] {
        ensure!(reached.contains(&state), "never killed after {state}");
    }
    let asked = left.len();
    left.sort_by(f64::total_cmp);
    left.dedup();
    ensure!(
        left.len() + 1 >= asked,
        "{asked} kills while it computes were at no more moments than these: {left:?}"
    );
    Ok(())
}

/// While it computes, at nine of eleven steps, and once after.
pub(crate) async fn ten_moments() -> Result<()> {
    let moments: Vec<Moment> = (0..9).map(Computed).chain([Published]).collect();
    kills_at(SHM, &moments).await
}

/// Five of these.
pub(crate) async fn five_moments_over_tcp() -> Result<()> {
    let moments = [0, 2, 4, 7].map(Computed).into_iter().chain([Published]);
    kills_at(TCP, &moments.collect::<Vec<_>>()).await
}
