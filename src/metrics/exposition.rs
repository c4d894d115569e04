//! The two texts in which metrics are told: OpenMetrics, which current servers ask for, and the older text format, which
//! everything else reads (older scrapers, `promtool check metrics`, `curl`). Samples are the same in both; the older one
//! describes a counter under the name of its sample, and knows neither units nor infos.

/// How a page of metrics is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    OpenMetrics,
    Text,
}

impl Exposition {
    /// What somebody wants who accepts these media types.
    pub fn accepted(accept: Option<&str>) -> Self {
        match accept {
            Some(types) if types.contains("application/openmetrics-text") => Exposition::OpenMetrics,
            _ => Exposition::Text,
        }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Exposition::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Exposition::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// A page of OpenMetrics, written so.
    pub fn of(self, page: String) -> String {
        match self {
            Exposition::OpenMetrics => page,
            Exposition::Text => text(&page),
        }
    }
}

fn text(page: &str) -> String {
    let mut told = String::with_capacity(page.len());
    let mut help = "";
    for line in page.lines() {
        if let Some((_, words)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            help = words;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            told.push_str(&format!("# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n"));
        } else if !line.starts_with('#') {
            told.push_str(line);
            told.push('\n');
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_text_describes_counters_and_infos_by_their_samples() {
        let open = "\
# HELP a_events Events.
# TYPE a_events counter
a_events_total{pipeline=\"x y\"} 3
# HELP a_delivery_seconds Time.
# TYPE a_delivery_seconds histogram
# UNIT a_delivery_seconds seconds
a_delivery_seconds_sum 1.5
# HELP a_build The program.
# TYPE a_build info
a_build_info{version=\"1\"} 1
# EOF
";
        let text = "\
# HELP a_events_total Events.
# TYPE a_events_total counter
a_events_total{pipeline=\"x y\"} 3
# HELP a_delivery_seconds Time.
# TYPE a_delivery_seconds histogram
a_delivery_seconds_sum 1.5
# HELP a_build_info The program.
# TYPE a_build_info gauge
a_build_info{version=\"1\"} 1
";
        assert_eq!(Exposition::Text.of(open.to_owned()), text);
        assert_eq!(Exposition::OpenMetrics.of(open.to_owned()), open);
    }

    #[test]
    fn who_does_not_ask_for_openmetrics_gets_the_older_text() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        assert_eq!(Exposition::accepted(Some(prometheus)), Exposition::OpenMetrics);
        for other in [None, Some("*/*"), Some("text/plain")] {
            assert_eq!(Exposition::accepted(other), Exposition::Text);
        }
    }
}
