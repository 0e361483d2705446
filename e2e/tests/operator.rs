//! The operator against a real API server, with real workers as the pods of a node that is only said to be there: who leads, what a
//! killed one leaves behind, that a cluster at rest is left in peace, that an API server in trouble leads to nothing done twice, and that a
//! worker which does not answer holds no deletion up.

use std::time::Duration;

use anyhow::ensure;
use baton_e2e::cluster::faulty::{Fault, Passed};
use baton_e2e::cluster::quiet;
use baton_e2e::cluster::two_pools::{LEAST, REPLICAS, TwoPools};
use baton_e2e::{scenario, told, wait};
use rustix::process::Signal;

/// Workers of the tiny model register within seconds, and idle ones drain at once.
const SOON: Duration = Duration::from_secs(90);
/// A lease is 30 s, and a candidate looks every 2 s.
const AFTER_A_DEATH: Duration = Duration::from_secs(75);
/// One look takes at most a minute, a watch that says nothing is opened anew a little later; then comes what was waiting.
const AFTER_A_SILENCE: Duration = Duration::from_secs(180);
/// Kills of one test, and the seed of when they come.
const KILLS: u32 = 12;
const SEED: u64 = 20_261_130;

#[test]
fn of_two_operators_one_leads_and_a_cluster_at_rest_is_left_in_peace() {
    scenario(async {
        let Some(pools) = TwoPools::start()? else {
            return Ok(());
        };
        let baton = &pools.baton;
        let way = baton.faulty("way").await?;
        let mut first = baton.operator_by("first", "one", &way.kubeconfig)?;
        first.leads(SOON).await?;
        pools.apply(64)?;
        pools.ready(SOON)?;

        // The second watches and does nothing; the first has nothing to do.
        let second = baton.operator("second", "one")?;
        let from = baton.at_rest(SOON).await?;
        // The one wait for a length of time: that nothing happens cannot be seen earlier.
        tokio::time::sleep(quiet()).await;
        let (writes, _) = baton.writes(from)?;
        let ours: Vec<_> = writes
            .iter()
            .filter(|write| write.is_the_operators())
            .collect();
        ensure!(
            ours.is_empty(),
            "a cluster at rest was written to: {ours:#?}"
        );
        let renewals = writes
            .iter()
            .filter(|write| write.resource == "leases" && write.name == "one")
            .count();
        ensure!(
            renewals > 0,
            "the log has no renewal of the lease: it is not the log"
        );
        let quiet = quiet();
        told(&format!(
            "at rest for {quiet:?}: 0 writes, {renewals} renewals of the lease"
        ));
        ensure!(
            second.metric("baton_operator_leading").await? == 0.0,
            "both lead"
        );

        // Stopped while it waits to write again what was refused, it gives nothing back: the second waits until the lease has expired,
        // and goes on with all that has happened.
        way.decide(|write| {
            let again = Some(1);
            (!write.is_of_a_lease()).then_some(Fault::Refused { status: 429, again })
        });
        baton.kubectl().run(&[
            "scale",
            "decodepool/decode",
            "--namespace=tried",
            &format!("--replicas={}", REPLICAS + 1),
        ])?;
        let refused = || {
            way.passed()
                .iter()
                .filter(|one| one.fault.is_some())
                .count()
        };
        wait::until("a write is refused", SOON, async || {
            (refused() > 0).then_some(()).ok_or_else(String::new)
        })
        .await?;
        first.process.signal(Signal::STOP);
        second.leads(AFTER_A_DEATH).await?;
        pools.ready(SOON)?;
        ensure!(pools.pods("decode")?.len() == REPLICAS + 1);

        // Continued, the first one has lost: it ends, and has written nothing any more. In a cluster it is started again, and waits.
        way.decide(|_| None);
        let before = way.passed().len();
        first.process.signal(Signal::CONT);
        let status = first.process.wait(SOON)?;
        ensure!(!status.success(), "it ended as if all were well");
        let late: Vec<_> = way.passed().split_off(before);
        ensure!(
            late.is_empty(),
            "written after the lease was lost: {late:?}"
        );
        pools.ready(SOON)?;

        // Asked to end, it gives the lease back: the third need not wait until it has expired, and may have it already.
        let third = baton.operator("third", "one")?;
        let mut second = second;
        second.process.signal(Signal::TERM);
        let status = second.process.wait(SOON)?;
        ensure!(status.success(), "{status}: {}", second.process.errors());
        let lease = ["lease", "one", "--namespace=baton-system"];
        let lease = baton.kubectl().get(&lease)?;
        let holder = lease["spec"]["holderIdentity"].as_str();
        ensure!(
            !holder.is_some_and(|holder| holder.starts_with("second_")),
            "the second has ended, and holds the lease: {lease}"
        );
        third.leads(AFTER_A_DEATH).await?;
        Ok(())
    });
}

#[test]
fn an_operator_that_is_killed_anywhere_goes_on_where_it_was() {
    scenario(async {
        let Some(pools) = TwoPools::start()? else {
            return Ok(());
        };
        let history = pools.history()?;
        let mut random = SEED;
        let mut below = |bound: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        // From nothing to all, then from revision to revision: whatever it is at, it is killed at it.
        for kill in 0..KILLS {
            pools.apply(64 + 16 * (kill / 2))?;
            // Each has a lease of its own: none of the dead ones renews, and their leases need not be waited for.
            let name = format!("killed-{kill}");
            let mut operator = pools.baton.operator(&name, &name)?;
            operator.leads(SOON).await?;
            let pause = Duration::from_millis(below(2_500));
            tokio::time::sleep(pause).await;
            operator.process.signal(Signal::KILL);
            operator.process.wait(SOON)?;
        }
        let last = pools.baton.operator("last", "last")?;
        pools.ready(SOON)?;
        drop(last);
        pools.rest()?;
        // The kills were not all before anything happened: six revisions of four pods, as far as each got.
        let made = pools.nothing_twice(|_| 0)?;
        ensure!(made > 2 * (REPLICAS + 1), "only {made} pods were ever made");
        // Nor did one take a pod out that its predecessor could not do without.
        history.floor_kept(REPLICAS, LEAST)?;
        Ok(())
    });
}

#[test]
fn a_worker_that_answers_nobody_holds_no_deletion_up() {
    scenario(async {
        let Some(pools) = TwoPools::start()? else {
            return Ok(());
        };
        let operator = pools.baton.operator("operator", "one")?;
        operator.leads(SOON).await?;
        pools.apply(64)?;
        pools.ready(SOON)?;

        // A pool, until its last pod is gone; then all else, while the operator looks on.
        pools.freeze("decode", SOON)?;
        let kubectl = pools.baton.kubectl();
        let tried = "--namespace=tried";
        let foreground = ["--cascade=foreground", "--timeout=120s", tried];
        kubectl.run(&[&["delete", "decodepool/decode"], &foreground[..]].concat())?;
        let left = pools.pods("decode")?;
        ensure!(left.is_empty(), "pods of a pool that is gone: {left:#?}");

        pools.freeze("prefill", SOON)?;
        kubectl.run(&["delete", "namespace", "tried", "--timeout=120s"])?;
        ensure!(
            operator.metric("baton_operator_leading").await? == 1.0,
            "the operator did not outlive it"
        );
        Ok(())
    });
}

#[test]
fn an_api_server_in_every_trouble_leads_to_nothing_done_twice() {
    scenario(async {
        let Some(pools) = TwoPools::start()? else {
            return Ok(());
        };
        let history = pools.history()?;
        let way = pools.baton.faulty("way").await?;
        let operator = pools
            .baton
            .operator_by("operator", "one", &way.kubeconfig)?;
        operator.leads(SOON).await?;

        // Writes that are refused, and writes that are done and whose answer is lost, of every kind in turn.
        let refused = |status, again| Fault::Refused { status, again };
        way.decide(now_and_then(vec![
            Fault::Lost,
            Fault::Overdue,
            refused(429, Some(1)),
            refused(500, None),
            refused(503, None),
        ]));
        pools.apply(64)?;
        pools.ready(SOON)?;
        pools.apply(80)?;
        pools.ready(SOON)?;
        way.decide(|_| None);

        // Watches that are cut and watches that are told to begin anew, each in the middle of a rollout.
        pools.apply(96)?;
        for turn in 0..6 {
            let before = way.watches();
            let ended = if turn % 2 == 0 {
                way.cut_watches()
            } else {
                way.outdate_watches()
            };
            wait::until("watches are opened anew", SOON, async || {
                let now = way.watches();
                (ended >= before && now > before)
                    .then_some(())
                    .ok_or_else(|| format!("{now} of them"))
            })
            .await?;
        }
        pools.ready(SOON)?;

        // A write that is never answered, and from then on watches that stay open and say nothing.
        way.decide(once(Fault::Unanswered));
        pools.apply(112)?;
        wait::until("a write is not answered", SOON, async || {
            let passed = way.passed();
            let hangs = passed
                .iter()
                .any(|one| one.fault == Some(Fault::Unanswered));
            hangs.then_some(()).ok_or_else(|| "none".to_owned())
        })
        .await?;
        way.silence_watches();
        pools.ready(AFTER_A_SILENCE)?;

        pools.rest()?;
        let passed = way.passed();
        let made = pools.nothing_twice(|pod| {
            passed
                .iter()
                .filter(|one| one.is_an_unheard_deletion_of(pod))
                .count()
        })?;
        let taken = history.floor_kept(REPLICAS, LEAST)?;
        ensure!(
            made >= 4 * (REPLICAS + 1) && taken >= 3 * REPLICAS,
            "{made} pods were made and {taken} taken out in four revisions"
        );
        for kind in ["Lost", "Overdue", "429", "500", "503"] {
            let passed = way.passed();
            let faults = passed.iter().filter_map(|one| one.fault);
            let count = faults.filter(|fault| format!("{fault:?}").contains(kind));
            ensure!(count.count() > 1, "{kind} was not met: {passed:?}");
        }
        Ok(())
    });
}

/// Every fifth write has a fault, of each kind in turn, three times each; then none has. Leases are left alone.
fn now_and_then(faults: Vec<Fault>) -> impl FnMut(&Passed) -> Option<Fault> {
    let mut count = 0;
    move |write| {
        if write.is_of_a_lease() {
            return None;
        }
        count += 1;
        let turn = count / 5;
        (count % 5 == 0 && turn <= 3 * faults.len()).then(|| faults[(turn - 1) % faults.len()])
    }
}

fn once(fault: Fault) -> impl FnMut(&Passed) -> Option<Fault> {
    let mut left = Some(fault);
    move |write| {
        if write.is_of_a_lease() {
            return None;
        }
        left.take()
    }
}
