//! Whatever happens to a fleet, a view that shares with the one before equals one that is made from nothing.

use baton_placement::breaker::Pass;
use baton_placement::coefficients::LinkName;
use baton_placement::fleet::OwnDispatches;
use baton_placement::place::{Request, place};
use baton_placement::policy::{Mode, Policy};
use baton_placement::rng::Rng;
use baton_protocol::card::TopologyDomain;
use baton_protocol::hash::HashKey;
use baton_protocol::identity::Fact;
use baton_protocol::ids::Incarnation;
use baton_protocol::wire::{self, watch_event::Event};
use tokio::time::advance;

use super::*;
use crate::clock::Clock;
use crate::fleet::artifacts::Artifacts;
use crate::fleet::discovery::Listed;
use crate::fleet::samples;
use crate::fleet::snapshot::Promise;
use crate::learning::LinkUse;
use crate::learning::tests::moved;

const HISTORIES: u64 = 100;
const STEPS: usize = 60;
const NAMES: [&str; 6] = ["d0", "d1", "d2", "p0", "p1", "p2"];
const HOSTS: [&str; 3] = ["h0", "h1", "h2"];

struct Bench {
    workers: Workers,
    policy: Policy,
    rng: Rng,
    sequence: u64,
}

impl Bench {
    fn new(seed: u64) -> Self {
        let workers = Workers::new(
            Clock::anchored(Moment(1_764_438_300_000_000)),
            1,
            HashKey::from_bytes(&[1; 32]),
            Artifacts::new(std::env::temp_dir()),
            Arc::default(),
            Arc::default(),
        );
        let mut bench = Self {
            workers,
            policy: Policy::new("chat", "m", &["p"], &["d"]),
            rng: Rng::new(seed),
            sequence: 0,
        };
        for name in NAMES {
            bench.come(name);
        }
        bench
    }

    /// A worker comes, says what it is, and reports.
    fn come(&mut self, name: &str) {
        let id = WorkerId::from(name);
        let channel = Channel::from_static("http://127.0.0.1:1").connect_lazy();
        let listed = self.listed(name);
        self.workers.add(&listed, WorkerClient::new(channel));
        self.workers.connected(&id);
        for event in [self.card(name), self.load()] {
            self.tell(&id, 1, event);
        }
    }

    fn tell(&self, id: &WorkerId, incarnation: u64, event: Event) {
        let event = wire::WatchEvent {
            incarnation,
            sequence: 0,
            event: Some(event),
        };
        // One that comes too soon, or of a worker that is not there, changes nothing.
        let _ = self.workers.apply(id, event);
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.below(of.len())]
    }

    fn listed(&mut self, name: &str) -> Listed {
        let host = self.one_of(&[None, Some(HOSTS[0]), Some(HOSTS[1])]);
        let domains = host.map(|host| ("host".to_owned(), Some(host.to_owned())));
        Listed {
            name: name.into(),
            control: "127.0.0.1:1".to_owned(),
            domains: domains.into_iter().collect(),
            leaving: false,
        }
    }

    /// Between workers that are there, if any are.
    fn link(&mut self) -> LinkUse {
        let view = self.workers.view();
        let mut end = || match view.members.len() {
            0 => vec![Some(HOSTS[0].to_owned())],
            members => view.members[self.rng.below(members)].path.clone(),
        };
        LinkUse {
            source: end(),
            target: end(),
            transport: "Tcp".to_owned(),
        }
    }

    fn card(&mut self, name: &str) -> Event {
        let mut card = match name.starts_with('p') {
            true => samples::prefill_card(name),
            false => samples::card(name),
        };
        if self.rng.below(4) == 0 {
            card.identity.kv_dtype = Fact::observed("F32".into());
        }
        card.topology = vec![TopologyDomain {
            level: self.one_of(&["host", "host", "rack"]).to_owned(),
            domain: self.one_of(&HOSTS).to_owned(),
        }];
        Event::Card(wire::Card {
            json: card.to_json().unwrap(),
        })
    }

    fn load(&mut self) -> Event {
        Event::Load(wire::Load {
            load_sequence: self.sequence,
            running_sequences: self.rng.below(9) as u32,
            ..wire::Load::default()
        })
    }

    /// Something happens to the fleet, or to what is known of it.
    async fn step(&mut self) {
        let name = self.one_of(&NAMES);
        let id = WorkerId::from(name);
        let now = self.workers.clock.now();
        self.sequence += 1;
        match self.rng.below(12) {
            0 => {
                self.workers.remove(&id);
                self.come(name);
            }
            1 if self.rng.below(3) == 0 => self.workers.remove(&id),
            2 => {
                let listed = self.listed(name);
                self.workers.relist(&listed);
            }
            3 => {
                let used = self.link();
                let learning = &self.workers.learning;
                learning.moved(&used, moved(), Pass::Free, &self.policy, now);
                self.workers.learnt_more();
            }
            4 => {
                let used = self.link();
                for _ in 0..self.policy.topology.breaker.failures {
                    let learning = &self.workers.learning;
                    learning.transfer_failed(&used, Pass::Free, &self.policy, now);
                }
                self.workers.learnt_more();
            }
            5 => {
                let dispatch = OwnDispatches {
                    queued_tokens: 100,
                    queued_sequences: 1,
                    ..OwnDispatches::default()
                };
                self.workers.dispatched(&id, Incarnation(1), dispatch);
            }
            6 => {
                let LinkUse { source, target, .. } = self.link();
                self.workers
                    .promise(Promise::new(&source, &target, 1 << 30));
            }
            7 => advance(Duration::from_millis(400)).await,
            8 => {
                let (incarnation, card) = (1 + self.rng.below(2) as u64, self.card(name));
                self.tell(&id, incarnation, card);
            }
            9 => {
                let draining = self.rng.below(2) == 0;
                self.tell(&id, 1, Event::Draining(wire::Draining { draining }));
            }
            _ => {
                let load = self.load();
                self.tell(&id, 1, load);
            }
        }
    }

    /// The set of the last view names every worker, and every link that has a fit or a prior.
    fn names_all(&self, seed: u64, step: usize) {
        let inner = self.workers.inner.lock();
        let known: Vec<(&Tracked, &Card)> = carded(&inner.tracked)
            .map(|(tracked, card)| (tracked, card.as_ref()))
            .collect();
        let levels = topology::levels(known.iter().map(|(tracked, _)| &**tracked.topology()));
        let learnt = self.workers.learning.learnt();
        let set = snapshot::coefficients(&known, &levels, &learnt, worker_prior(), link_prior);
        let (now, kept) = (names(&set), names(&inner.coefficients));
        assert_eq!(now, kept, "history {seed}, step {step}");
    }

    /// All that placement can see of a view: who is in it, what lies between them, and what is decided on it.
    fn seen(&self, view: &View) -> Vec<String> {
        let fleet = &view.fleet;
        let workers = 0..fleet.len();
        let pairs = workers.clone().flat_map(|first| {
            workers.clone().map(move |second| {
                let level = fleet.level(first, second);
                let compatible = fleet.compatible(first, second);
                format!("{level} {compatible} {:?}", fleet.breaker(first, second))
            })
        });
        let now = self.workers.clock.now().milliseconds();
        let decisions = [Mode::Aggregated, Mode::Disaggregated].map(|mode| {
            let request = Request {
                tokens: 700,
                max_output_tokens: 200,
                expected_output_tokens: 100.0,
                mode: Some(mode),
                ..Request::default()
            };
            let decision = place(fleet, &request, &self.policy, now, &mut Rng::new(7));
            format!("{decision:?}")
        });
        let members = view.members.iter().map(|member| {
            let (id, class, card) = (&member.id, &member.class, Arc::as_ptr(&member.card));
            format!("{id} {class} {card:p} {:?}", member.path)
        });
        let columns = format!("{:?} {:?} {:?}", fleet.levels, fleet.workers, fleet.loads);
        let fixed = [
            columns,
            fleet.coefficients_digest.to_string(),
            format!("{} {:?} {:p}", fleet.routers, view.expires, view.pairs),
        ];
        let rest = members.chain(pairs).chain(decisions);
        fixed.into_iter().chain(rest).collect()
    }
}

/// Workers and links of a set.
fn names(set: &CoefficientSet) -> (Vec<&str>, Vec<&LinkName>) {
    let workers = set.workers.iter().map(|class| class.name.as_str());
    (
        workers.collect(),
        set.links.iter().map(|link| &link.name).collect(),
    )
}

#[tokio::test(start_paused = true)]
async fn a_view_that_shares_with_the_one_before_is_as_if_made_from_nothing() {
    let (mut shared, mut decided, mut shut) = (0, 0, 0);
    for seed in 0..HISTORIES {
        let mut bench = Bench::new(seed);
        let mut before = bench.workers.view();
        for step in 0..STEPS {
            bench.step().await;
            let view = bench.workers.view();
            shared += usize::from(Arc::ptr_eq(&view.members, &before.members));
            bench.names_all(seed, step);
            bench.workers.inner.lock().standing = None;
            bench.workers.changed();
            let anew = bench.workers.view();
            let seen = bench.seen(&view);
            assert_eq!(seen, bench.seen(&anew), "history {seed}, step {step}");
            decided += usize::from(seen.iter().any(|line| line.contains("Remote {")));
            shut += usize::from(seen.iter().any(|line| line.ends_with("true Open")));
            before = anew;
        }
    }
    let views = HISTORIES as usize * STEPS;
    assert!(shared > views / 3, "{shared} of {views} views share");
    assert!(decided > views / 20, "{decided} of {views} have a pair");
    assert!(shut > views / 20, "{shut} of {views} have an open link");
}
