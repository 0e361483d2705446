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
    /// It failed by the engine's own word, which has counted against the link: what the engine counts of it does not again.
    charged: bool,
    seen: Seen,
    /// The worker's last report when the answer had begun: the KV had been fetched by then, or given up.
    over: Option<u64>,
    /// Nobody asks for it any more.
    ended: bool,
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

    /// It has failed, and counts against its link already.
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

    /// A report: by how much its count of failed transfers has risen. `others`: routers that are not this one send the worker requests
    /// too. Gives the links that the failed ones may have gone over, each once, without those that were charged; `None` where nothing is
    /// known.
    pub fn reported(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        load_sequence: u64,
        failed: u64,
        others: bool,
    ) -> Option<Vec<LinkUse>> {
        let fetches = self.workers.get_mut(worker)?;
        // Of another process of the engine nothing is heard any more.
        fetches.retain(|fetching| fetching.incarnation == incarnation);
        let mut links: Option<Vec<LinkUse>> = None;
        if failed > 0 {
            let under_way = fetches.iter_mut().filter(|fetching| !fetching.seen.settled);
            let mut under_way: Vec<&mut Fetching> = under_way.collect();
            if let ([alone], false) = (under_way.as_mut_slice(), others) {
                let seen = &mut alone.seen.failed;
                *seen = seen.map(|before| before.saturating_add(failed));
            } else {
                for fetching in &mut under_way {
                    fetching.seen.failed = None;
                }
            }
            for fetching in under_way.iter().filter(|_| !others) {
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
        links
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

        fn reported(&mut self, sequence: u64, failed: u64) -> Option<Vec<LinkUse>> {
            self.fetches
                .reported(&self.worker, FIRST, sequence, failed, false)
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
        assert_eq!(
            known.reported(6, 1),
            Some(Vec::new()),
            "known, and told: no other link is to blame"
        );
        known.begins("b");
        assert_eq!(known.reported(7, 1), Some(vec![link("b")]));
    }

    #[test]
    fn beside_other_routers_nothing_is_known_but_that_none_has_failed() {
        let mut known = Known::new();
        let ticket = known.begins("a");
        let links = known.fetches.reported(&known.worker, FIRST, 1, 0, true);
        assert_eq!(links, None);
        assert_eq!(known.seen(ticket), (Some(0), false));
        let links = known.fetches.reported(&known.worker, FIRST, 2, 1, true);
        assert_eq!(links, None, "it may have been another's");
        assert_eq!(known.seen(ticket), (None, false));
    }

    #[test]
    fn another_process_of_the_engine_says_nothing_of_what_the_last_one_fetched() {
        let mut known = Known::new();
        let ticket = known.begins("a");
        let other = Incarnation(2);
        known.fetches.reported(&known.worker, other, 9, 0, false);
        assert_eq!(known.fetches.seen(&known.worker, ticket), None);
    }
}
