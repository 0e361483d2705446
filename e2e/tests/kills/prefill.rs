//! The prefill worker is killed under a run, at moments that its own progress tells.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use baton_e2e::disaster::Killed;
use baton_e2e::fleet::{Fleet, Started};
use baton_e2e::openai::{Ask, Output};
use baton_e2e::record::Record;
use baton_protocol::lifecycle::State;

use super::{
    SETTLED, SHM, TCP, ask, computed, frozen_reader, in_time, manifest, meanwhile, moved_over,
    one_more, reference, runs_in,
};

/// `baton up` doubles its wait before it starts a process anew, from half a second on: after so many kills another fleet is there sooner.
const KILLS_OF_A_FLEET: usize = 4;

/// Runs that may meet no moment. A busy machine lets one pass now and then, a fault all of them.
const MISSED: usize = 10;

/// Tokens that are asked for: six tenths of a second, for nobody strikes while they are generated.
const OUTPUT: u32 = 60;

/// When the prefill worker is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// So many steps are computed, and the next one is under way.
    Computed(u32),
    /// All is computed and published, and its reader has not read all of it.
    Published,
}
use Moment::{Computed, Published};

/// What kills came to.
#[derive(Debug, Default)]
struct Kills {
    expected: Option<Output>,
    /// Moments at which no kill has met a run yet.
    due: BTreeSet<Moment>,
    runs: usize,
    /// Runs of which none met a moment: it had passed before anybody looked, or the run was over before the kill.
    missed: usize,
    /// States that the others had been in.
    reached: BTreeSet<State>,
}

fn short(mode: &'static str, salt: &str) -> Ask {
    ask(mode, salt).with("max_tokens", OUTPUT)
}

/// Kills the prefill worker at the first moment that is due and is seen: one that is passed unseen stays due. Also which moment it was.
async fn kill_at_one_of(
    fleet: &Fleet,
    due: &BTreeSet<Moment>,
) -> Result<(Moment, Started, Killed)> {
    // The last of all, when no other is due.
    let (moment, worker, frozen) = if due.first() == Some(&Published) {
        let before = runs_in(fleet, State::KvPublished).await?;
        let (worker, frozen) = frozen_reader(fleet).await?;
        one_more(fleet, State::KvPublished, before).await?;
        (Published, worker, Some(frozen))
    } else {
        let is_due = |steps| due.contains(&Computed(steps));
        let (worker, steps) = computed(fleet, is_due).await?;
        (Computed(steps), worker, None)
    };
    let killed = fleet.kill(worker.clone()).await?;
    drop(frozen);
    Ok((moment, worker, killed))
}

/// Kills prefill workers of one fleet, one run at a time.
async fn prefill_kills(over: &str, kills: &mut Kills) -> Result<()> {
    let fleet = Fleet::of(&manifest(over)).await?;
    if kills.expected.is_none() {
        let expected = reference(&fleet, short).await?;
        let undisturbed = in_time(&fleet, &short("Disaggregated", "undisturbed")).await?;
        ensure!(undisturbed.output == expected, "{:?}", undisturbed.output);
        let record = Record::of(&fleet.admin, &undisturbed.run).await?;
        ensure!(record.kind()? == "Remote", "not remote: {}", record.0);
        ensure!(record.bytes() > 0, "nothing was moved: {}", record.0);
        moved_over(&record, over)?;
        fleet.idle(SETTLED).await?;
        kills.expected = Some(expected);
    }
    let mut killed_here = 0;
    while killed_here < KILLS_OF_A_FLEET && !kills.due.is_empty() {
        kills.runs += 1;
        let request = short("Disaggregated", &format!("run-{}", kills.runs));
        let strike = kill_at_one_of(&fleet, &kills.due);
        let (answer, struck) = meanwhile(in_time(&fleet, &request), strike).await?;
        let at = struck.as_ref().map(|(moment, ..)| *moment);
        let answer = answer.with_context(|| format!("killed at {at:?}"))?;
        ensure!(
            Some(&answer.output) == kills.expected.as_ref(),
            "killed at {at:?}: {:?} instead of {:?}",
            answer.output,
            kills.expected
        );
        let record = Record::of(&fleet.admin, &answer.run).await?;
        record.check_order()?;
        ensure!(record.kind()? == "Remote", "not remote: {}", record.0);
        moved_over(&record, over)?;
        let mut met = false;
        if let Some((moment, worker, killed)) = struck {
            killed_here += 1;
            // A run that was over before the kill shows nothing.
            if record.attempts()? > 1 {
                fleet
                    .lost(&record, &worker)
                    .with_context(|| format!("killed at {moment:?}"))?;
                kills.due.remove(&moment);
                kills.reached.extend(record.first_attempt()?);
                met = true;
            }
            fleet.back(&killed).await?;
        }
        fleet.idle(SETTLED).await?;
        kills.missed += usize::from(!met);
        ensure!(
            kills.missed <= MISSED,
            "{} of {} runs met no moment, and these are due: {:?}",
            kills.missed,
            kills.runs,
            kills.due
        );
    }
    fleet.end().await
}

/// Kills at each of these moments, in the order in which they are met.
async fn kills_at(over: &str, moments: impl IntoIterator<Item = Moment>) -> Result<()> {
    let mut kills = Kills {
        due: moments.into_iter().collect(),
        ..Kills::default()
    };
    while !kills.due.is_empty() {
        Box::pin(prefill_kills(over, &mut kills)).await?;
    }
    for state in [
        State::PrefillStarted,
        State::KvTransferStarted,
        State::PrefillCompleted,
        State::KvPublished,
    ] {
        ensure!(kills.reached.contains(&state), "never killed after {state}");
    }
    Ok(())
}

/// While it computes, at nine of eleven steps, and once after.
pub(crate) async fn ten_moments() -> Result<()> {
    kills_at(SHM, (0..9).map(Computed).chain([Published])).await
}

/// Five of these.
pub(crate) async fn five_moments_over_tcp() -> Result<()> {
    kills_at(
        TCP,
        [0, 2, 4, 7].map(Computed).into_iter().chain([Published]),
    )
    .await
}
