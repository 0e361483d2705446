//! Hand-offs that engines fetch by themselves, as this router has sent them: of which of them a rise of an engine's counter speaks. Pure.
//!
//! An engine counts the transfers that it gave up, and does not say of which requests. Where one alone was under way it is known.

use std::collections::HashMap;

use baton_protocol::ids::{Incarnation, WorkerId};

use crate::learning::LinkUse;

/// The first report after an answer has begun may have been made before that.
const REPORTS: u64 = 2;

/// One hand-off that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FetchTicket(u64);

/// What the engine's counter has said of a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Failed transfers; `None`: there were some, and others were under way beside it.
    pub failed: Option<u64>,
    /// No report will say more.
    pub settled: bool,
}

#[derive(Clone, Debug)]
struct Fetching {
    ticket: FetchTicket,
    incarnation: Incarnation,
    link: Option<LinkUse>,
    /// It failed by the engine's own word, which has counted against the link, or was given up from here: what the engine counts of it is
    /// not to count against any link.
    charged: bool,
    /// Of a charged one: the engine has counted it.
    counted: bool,
    seen: Seen,
    /// The worker's last report when the answer had begun: the KV had been fetched by then, or given up.
    over: Option<u64>,
    /// Nobody asks for it any more.
    ended: bool,
}

/// By how much an engine's counters have risen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Transfers that failed.
    pub failed: u64,
    /// Those whose owner had ended the lease.
    pub ended: u64,
}

/// What of a rise speaks against links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blame {
    /// Failed transfers.
    pub failed: u64,
    /// The links that they may have gone over, each once; `None`: nothing is known of them.
    pub links: Option<Vec<LinkUse>>,
}

/// By the worker that fetches. Bounded by the requests in flight, and by those since its last report.
#[derive(Clone, Debug, Default)]
pub struct Fetches {
    next: u64,
    workers: HashMap<WorkerId, Vec<Fetching>>,
}

impl Fetches {
    /// An engine is about to be sent to fetch.
    pub fn begins(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        link: Option<LinkUse>,
    ) -> FetchTicket {
        let ticket = FetchTicket(self.next);
        self.next += 1;
        let fetching = Fetching {
            ticket,
            incarnation,
            link,
            charged: false,
            counted: false,
            seen: Seen {
                failed: Some(0),
                settled: false,
            },
            over: None,
            ended: false,
        };
        let fetches = self.workers.entry(worker.clone()).or_default();
        fetches.push(fetching);
        ticket
    }

    /// Its answer has begun; `last_report` of the worker has come before.
    pub fn over(&mut self, worker: &WorkerId, ticket: FetchTicket, last_report: u64) {
        self.change(worker, ticket, |fetching| {
            fetching.over.get_or_insert(last_report);
        });
    }

    /// It has failed, and counts against its link already, or was given up from here.
    pub fn charged(&mut self, worker: &WorkerId, ticket: FetchTicket) {
        self.change(worker, ticket, |fetching| fetching.charged = true);
    }

    /// Nobody asks for it any more. Until reports have come that must count it, what they count may be of it all the same.
    pub fn ended(&mut self, worker: &WorkerId, ticket: FetchTicket, last_report: u64) {
        self.change(worker, ticket, |fetching| {
            fetching.over.get_or_insert(last_report);
            fetching.ended = true;
        });
    }

    /// A report: by how much its counters have risen. `others`: routers that are not this one send the worker requests too. What was
    /// charged is taken to be what the engine counts first, once each, before anything is held against others.
    pub fn reported(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        load_sequence: u64,
        counted: Counted,
        others: bool,
    ) -> Blame {
        let Counted {
            mut failed,
            mut ended,
        } = counted;
        let Some(fetches) = self.workers.get_mut(worker) else {
            let links = None;
            return Blame { failed, links };
        };
        // Of another process of the engine nothing is heard any more.
        fetches.retain(|fetching| fetching.incarnation == incarnation);
        let mut links: Option<Vec<LinkUse>> = None;
        let rise = failed.saturating_add(ended);
        if rise > 0 {
            let under_way = fetches.iter_mut().filter(|fetching| !fetching.seen.settled);
            let mut under_way: Vec<&mut Fetching> = under_way.collect();
            if let ([alone], false) = (under_way.as_mut_slice(), others) {
                let seen = &mut alone.seen.failed;
                *seen = seen.map(|before| before.saturating_add(rise));
            } else {
                for fetching in &mut under_way {
                    fetching.seen.failed = None;
                }
            }
            for fetching in under_way
                .iter_mut()
                .filter(|one| one.charged && !one.counted)
            {
                // Daemons of earlier releases do not tell the two apart.
                let left = if ended > 0 { &mut ended } else { &mut failed };
                fetching.counted = *left > 0;
                *left = left.saturating_sub(1);
            }
            for fetching in under_way.iter().filter(|_| failed > 0 && !others) {
                if let Some(link) = &fetching.link {
                    let links = links.get_or_insert_default();
                    if !fetching.charged && !links.contains(link) {
                        links.push(link.clone());
                    }
                }
            }
        }
        for fetching in fetches.iter_mut() {
            let counted_from = fetching.over.map(|over| over.saturating_add(REPORTS));
            fetching.seen.settled |= counted_from.is_some_and(|from| load_sequence >= from);
        }
        self.tidy(worker);
        Blame { failed, links }
    }

    /// `None`: the engine's process is another one now.
    pub fn seen(&self, worker: &WorkerId, ticket: FetchTicket) -> Option<Seen> {
        let mut fetches = self.workers.get(worker)?.iter();
        let found = fetches.find(|fetching| fetching.ticket == ticket)?;
        Some(found.seen)
    }

    /// The worker is known no more.
    pub fn forget(&mut self, worker: &WorkerId) {
        self.workers.remove(worker);
    }

    fn change(
        &mut self,
        worker: &WorkerId,
        ticket: FetchTicket,
        change: impl FnOnce(&mut Fetching),
    ) {
        let fetches = self.workers.get_mut(worker).into_iter().flatten();
        let mut found = fetches.filter(|fetching| fetching.ticket == ticket);
        if let Some(fetching) = found.next() {
            change(fetching);
        }
        self.tidy(worker);
    }

    fn tidy(&mut self, worker: &WorkerId) {
        if let Some(fetches) = self.workers.get_mut(worker) {
            fetches.retain(|fetching| !(fetching.ended && fetching.seen.settled));
            if fetches.is_empty() {
                self.workers.remove(worker);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Incarnation = Incarnation(1);

    fn link(source: &str) -> LinkUse {
        LinkUse {
            source: vec![Some(source.to_owned())],
            target: vec![Some("d".to_owned())],
            transport: "Nixl".to_owned(),
        }
    }

    struct Known {
        fetches: Fetches,
        worker: WorkerId,
    }

    impl Known {
        fn new() -> Self {
            Self {
                fetches: Fetches::default(),
                worker: "d".into(),
            }
        }

        fn begins(&mut self, source: &str) -> FetchTicket {
            self.fetches.begins(&self.worker, FIRST, Some(link(source)))
        }

        fn blames(&mut self, sequence: u64, failed: u64, ended: u64, others: bool) -> Blame {
            let counted = Counted { failed, ended };
            self.fetches
                .reported(&self.worker, FIRST, sequence, counted, others)
        }

        fn reported(&mut self, sequence: u64, failed: u64) -> Option<Vec<LinkUse>> {
            self.blames(sequence, failed, 0, false).links
        }

        fn seen(&self, ticket: FetchTicket) -> (Option<u64>, bool) {
            let seen = self.fetches.seen(&self.worker, ticket).unwrap();
            (seen.failed, seen.settled)
        }
    }

    #[test]
    fn one_that_was_alone_under_way_is_the_one_that_failed_and_its_link_alone_is_charged() {
        let mut known = Known::new();
        let first = known.begins("a");
        known.fetches.over(&known.worker, first, 5);
        assert_eq!(known.reported(6, 0), None);
        assert_eq!(known.seen(first), (Some(0), false), "made before its end");
        assert_eq!(known.reported(7, 2), Some(vec![link("a")]));
        assert_eq!(known.seen(first), (Some(2), true));
        // What comes later is not of it, though its record is not kept yet.
        let second = known.begins("b");
        assert_eq!(known.reported(8, 1), Some(vec![link("b")]));
        assert_eq!(known.seen(first), (Some(2), true));
        assert_eq!(known.seen(second), (Some(1), false));
    }

    #[test]
    fn of_several_under_way_nobody_knows_which_has_failed() {
        let mut known = Known::new();
        let (one, other) = (known.begins("a"), known.begins("b"));
        let again = known.begins("a");
        assert_eq!(known.reported(1, 0), None);
        assert_eq!(known.seen(one), (Some(0), false), "none has failed so far");
        assert_eq!(known.reported(2, 1), Some(vec![link("a"), link("b")]));
        for ticket in [one, other, again] {
            assert_eq!(known.seen(ticket).0, None);
        }
    }

    #[test]
    fn one_that_nobody_asks_for_any_more_may_still_be_what_has_failed() {
        let mut known = Known::new();
        let gone = known.begins("a");
        known.fetches.ended(&known.worker, gone, 5);
        let next = known.begins("b");
        assert_eq!(known.reported(6, 1), Some(vec![link("a"), link("b")]));
        assert_eq!(known.seen(next).0, None);
        known.reported(7, 0);
        assert_eq!(known.reported(8, 1), Some(vec![link("b")]));
        known.fetches.ended(&known.worker, next, 8);
        known.reported(10, 0);
        assert!(known.fetches.workers.is_empty(), "nothing is kept");
    }

    #[test]
    fn one_whose_failure_was_said_is_not_counted_against_its_link_again() {
        let mut known = Known::new();
        let failed = known.begins("a");
        known.fetches.charged(&known.worker, failed);
        known.fetches.ended(&known.worker, failed, 5);
        assert_eq!(known.blames(6, 1, 0, false), Blame::default());
        known.begins("b");
        assert_eq!(
            known.reported(7, 1),
            Some(vec![link("b")]),
            "it was counted once"
        );
    }

    #[test]
    fn what_was_charged_is_counted_before_others_are_blamed() {
        for others in [false, true] {
            let mut known = Known::new();
            known.begins("b");
            for _ in 0..3 {
                let given_up = known.begins("a");
                known.fetches.charged(&known.worker, given_up);
            }
            assert_eq!(known.blames(1, 2, 0, others).failed, 0, "{others}");
            let blame = known.blames(2, 3, 0, others);
            assert_eq!(blame.failed, 2, "one was left of those that were charged");
            let links = (!others).then(|| vec![link("b")]);
            assert_eq!(blame.links, links);
        }
    }

    /// The prompt was given up where it lay: the record has it, and no link.
    #[test]
    fn what_the_owner_has_ended_is_seen_and_speaks_against_no_link() {
        let mut known = Known::new();
        let ticket = known.begins("a");
        assert_eq!(known.blames(1, 0, 1, false), Blame::default());
        assert_eq!(known.seen(ticket), (Some(1), false));
        // It takes the place of one that was charged, which then excuses nothing more.
        known.fetches.charged(&known.worker, ticket);
        assert_eq!(known.blames(2, 0, 1, false), Blame::default());
        known.begins("b");
        let links = Some(vec![link("b")]);
        assert_eq!(
            known.blames(3, 1, 0, false),
            Blame { failed: 1, links },
            "another one's"
        );
    }

    #[test]
    fn beside_other_routers_nothing_is_known_but_that_none_has_failed() {
        let mut known = Known::new();
        let ticket = known.begins("a");
        assert_eq!(known.blames(1, 0, 0, true), Blame::default());
        assert_eq!(known.seen(ticket), (Some(0), false));
        let (failed, links) = (1, None);
        assert_eq!(
            known.blames(2, 1, 0, true),
            Blame { failed, links },
            "it may have been another's"
        );
        assert_eq!(known.seen(ticket), (None, false));
    }

    #[test]
    fn another_process_of_the_engine_says_nothing_of_what_the_last_one_fetched() {
        let mut known = Known::new();
        let ticket = known.begins("a");
        let other = Incarnation(2);
        let counted = Counted::default();
        known
            .fetches
            .reported(&known.worker, other, 9, counted, false);
        assert_eq!(known.fetches.seen(&known.worker, ticket), None);
    }
}
