//! Whose letters are meant: one pipeline of the configuration, and one of its publishers.

use super::{WhoseArgs, usage};
use crate::cli::choose;
use crate::config::{Brokers, DeadLetter, LogFormat, PipelineSettings, PublisherSettings, SinkSettings};
use crate::dead_letters::Whose;
use crate::failure::Halt;

pub struct Place {
    pub pipeline: PipelineSettings,
    /// Which of its publishers.
    publisher: usize,
    pub log_format: Option<LogFormat>,
}

impl Place {
    pub fn choose(args: WhoseArgs) -> Result<Self, Halt> {
        let sends = !args.pipelines.without_sink;
        let (settings, wanted) = (choose::settings(&args.pipelines)?, args.publisher);
        let log_format = settings.process.log_format;
        let pipeline = choose::one(settings.pipelines)?;
        let known = pipeline.publishers.iter().map(|publisher| publisher.name.as_str()).collect::<Vec<_>>().join(", ");
        let publisher = match wanted {
            Some(wanted) => pipeline.publishers.iter().position(|publisher| publisher.name == wanted),
            None if pipeline.publishers.len() == 1 => Some(0),
            None => {
                let what = format!("pipeline {} has several publishers", pipeline.name);
                return Err(usage(what, &format!("say --publisher; there are {known}")));
            }
        };
        let Some(publisher) = publisher else {
            let what = format!("pipeline {} has no such publisher", pipeline.name);
            return Err(usage(what, &format!("there are {known}")));
        };
        let place = Place { pipeline, publisher, log_format };
        place.needs_brokers(sends)?;
        Ok(place)
    }

    /// An embedded broker is of the process that started it.
    fn needs_brokers(&self, sends: bool) -> Result<(), Halt> {
        let publisher = self.publisher();
        let needed = matches!(publisher.dead_letter, DeadLetter::Topic(_))
            || sends && matches!(publisher.sink, SinkSettings::Kafka);
        match publisher.kafka.brokers {
            Brokers::Embedded | Brokers::None if needed => {
                Err(usage("--brokers: is missing, or is an embedded broker", "say --brokers as `run` has it"))
            }
            _ => Ok(()),
        }
    }

    pub fn publisher(&self) -> &PublisherSettings {
        &self.pipeline.publishers[self.publisher]
    }

    pub fn whose(&self) -> Whose {
        Whose { pipeline: self.pipeline.name.clone(), publisher: self.publisher().name.clone() }
    }
}
