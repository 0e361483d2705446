//! Where finished spans are put. Putting never waits and never fails: what does not fit is dropped and counted.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::mpsc;

use crate::context::{TraceContext, TraceId};
use crate::sampling::Sampler;
use crate::span::Span;

/// What became of spans: `exported`, `failed` (the collector did not take them), `dropped` (the queue was full).
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabels {
    pub outcome: &'static str,
}

/// `baton_spans_total{outcome}`.
pub type Counts = Family<OutcomeLabels, Counter>;

/// Cloning shares it. The default one is off.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<On>>);

#[derive(Debug)]
struct On {
    queue: mpsc::Sender<Span>,
    sampler: Sampler,
    dropped: Counter,
}

impl Tracer {
    pub(crate) fn new(queue: mpsc::Sender<Span>, sampler: Sampler, counts: &Counts) -> Self {
        let labels = OutcomeLabels { outcome: "dropped" };
        Self(Some(Arc::new(On {
            queue,
            sampler,
            dropped: counts.get_or_create(&labels).clone(),
        })))
    }

    /// Nothing is ever traced.
    pub fn off() -> Self {
        Self::default()
    }

    /// The root of a run, with the decision whether it is recorded; `None` when tracing is off.
    pub fn root(&self, parent: Option<&TraceContext>, run: &str) -> Option<TraceContext> {
        let on = self.0.as_ref()?;
        let trace = parent.map_or_else(|| TraceId::of_run(run), |parent| parent.trace);
        let sampled = on.sampler.decide(trace, parent);
        Some(TraceContext::root(parent, run, sampled))
    }

    /// The place that a caller names for what is done for it; `None` when that is not recorded here.
    pub fn under(&self, traceparent: &str) -> Option<TraceContext> {
        let on = self.0.as_ref()?;
        let parent = TraceContext::parse(traceparent)?;
        let sampled = on.sampler.decide(parent.trace, Some(&parent));
        sampled.then_some(TraceContext { sampled, ..parent })
    }

    /// Hands spans to the exporter.
    pub fn put(&self, spans: impl IntoIterator<Item = Span>) {
        let Some(on) = &self.0 else {
            return;
        };
        for span in spans {
            if on.queue.try_send(span).is_err() {
                on.dropped.inc();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::Kind;

    fn tracer(capacity: usize, sampler: &str) -> (Tracer, mpsc::Receiver<Span>, Counts) {
        let (sender, receiver) = mpsc::channel(capacity);
        let counts = Counts::default();
        let sampler = Sampler::parse(sampler, None).unwrap();
        (Tracer::new(sender, sampler, &counts), receiver, counts)
    }

    fn span(begin: u64) -> Span {
        let context = TraceContext::root(None, "r", true);
        Span::new(&context, None, "accept", Kind::Server, (begin, begin))
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted() {
        let (tracer, mut queue, counts) = tracer(2, "always_on");
        tracer.put((0..5).map(span));
        let labels = OutcomeLabels { outcome: "dropped" };
        assert_eq!(counts.get_or_create(&labels).get(), 3);
        assert_eq!(queue.try_recv().map(|span| span.begin), Ok(0));
        drop(queue);
        tracer.put([span(9)]);
        assert_eq!(counts.get_or_create(&labels).get(), 4);
    }

    #[test]
    fn a_run_that_is_not_sampled_says_so_to_whom_it_calls() {
        let (tracer, _queue, _counts) = tracer(2, "parentbased_always_off");
        let root = tracer.root(None, "r0-1").unwrap();
        assert!(root.traceparent().ends_with("-00"));
        assert_eq!(tracer.under(&root.traceparent()), None);
        let client = TraceContext::root(None, "client", true);
        let root = tracer.root(Some(&client), "r0-1").unwrap();
        assert!(root.sampled);
        assert_eq!(tracer.under(&root.traceparent()), Some(root));
    }

    #[test]
    fn a_tracer_that_is_off_makes_nothing() {
        let tracer = Tracer::off();
        assert_eq!(tracer.root(None, "r0-1"), None);
        assert_eq!(tracer.under(&span(0).traceparent_of()), None);
        tracer.put([span(1)]);
    }

    impl Span {
        fn traceparent_of(&self) -> String {
            format!("00-{}-{}-01", self.trace, self.id)
        }
    }
}
