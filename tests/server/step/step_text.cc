#include "tests/server/step/step_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace ballast {
namespace {

uint64_t Id(SessionId session) { return static_cast<uint64_t>(session); }

std::string Of(uint32_t rank) { return rank == 0 ? "" : absl::StrCat(" rank=", rank); }

std::string Listed(const std::vector<bool>& bits) {
  std::vector<size_t> set;
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) set.push_back(i);
  }
  return absl::StrJoin(set, ",");
}

struct EventText {
  std::string operator()(const event::Attach& e) const {
    return absl::StrCat("attach s=", Id(e.session), " rank=", e.rank, " of=", e.world,
                        e.resumes ? absl::StrCat(" resumes=", Id(*e.resumes)) : "", e.takeover ? " takeover" : "",
                        e.from_step > 0 ? absl::StrCat(" from=", e.from_step) : "",
                        e.again_step > 0 ? absl::StrCat(" again=", e.again_step) : "");
  }
  std::string operator()(const event::KeepAlive& e) const { return absl::StrCat("keep-alive s=", Id(e.session)); }
  std::string operator()(const event::StreamOpened& e) const {
    return absl::StrCat("open s=", Id(e.session), " step=", e.weights_step, " have=", Listed(e.weights_received));
  }
  std::string operator()(const event::StreamClosed& e) const {
    return absl::StrCat(e.clean ? "leave" : "lost", " s=", Id(e.session));
  }
  std::string operator()(const event::StepBegin& e) const {
    return absl::StrCat("begin s=", Id(e.session), " step=", e.step,
                        " content=", absl::StrReplaceAll(e.content, {{" ", "-"}}));
  }
  std::string operator()(const event::MicroBegin& e) const {
    return absl::StrCat("micro-begin s=", Id(e.session), " micro=", e.micro, e.last ? " last" : "");
  }
  std::string operator()(const event::Chunk& e) const {
    return absl::StrCat("chunk s=", Id(e.session), " micro=", e.micro, " tensor=", e.tensor, " chunk=", e.chunk,
                        " crc=", e.crc);
  }
  std::string operator()(const event::MicroEnd& e) const {
    return absl::StrCat("micro-end s=", Id(e.session), " micro=", e.micro, " absent=", Listed(e.absent));
  }
  std::string operator()(const event::StepMeasure& e) const { return absl::StrCat("step-measure s=", Id(e.session)); }
  std::string operator()(const event::StepEnd& e) const {
    return absl::StrCat("step-end s=", Id(e.session),
                        e.content.empty() ? "" : " content=", absl::StrReplaceAll(e.content, {{" ", "-"}}),
                        e.discard ? " discard" : "");
  }
  std::string operator()(const event::TensorApplied& e) const {
    return absl::StrCat("applied step=", e.step, " tensor=", e.tensor);
  }
  std::string operator()(const event::Measured& e) const { return absl::StrCat("measured step=", e.step); }
  std::string operator()(const event::Verdict& e) const {
    const std::string why = absl::StrCat(" ", e.outcome == Outcome::kSkipped ? "skip=" : "abort=", e.reason);
    return absl::StrCat("verdict step=", e.step, e.outcome == Outcome::kApplied ? "" : why);
  }
  std::string operator()(const event::Rewind& e) const { return absl::StrCat("rewind to=", e.to_step); }
  std::string operator()(const event::Stop&) const { return "stop"; }
  std::string operator()(const event::Tick&) const { return "tick"; }
};

struct EffectText {
  std::string operator()(const effect::Reject& e) const {
    const std::string wait = e.retry_after_s > 0 ? absl::StrCat(" retry_after=", e.retry_after_s) : "";
    return absl::StrCat("reject ", absl::StatusCodeToString(e.status.code()), wait, ": ",
                        std::string(e.status.message()));
  }
  std::string operator()(const effect::Attached& e) const {
    return absl::StrCat("attached s=", Id(e.session), Of(e.rank), e.resumed ? " resumed" : "");
  }
  std::string operator()(const effect::Fence& e) const {
    return absl::StrCat("fence s=", Id(e.session), Of(e.rank), " ", absl::StatusCodeToString(e.status.code()));
  }
  std::string operator()(const effect::Opened& e) const {
    return absl::StrCat("opened step=", e.step, e.left_out.empty() ? "" : " without=", absl::StrJoin(e.left_out, ","));
  }
  std::string operator()(const effect::LeftOut& e) const { return absl::StrCat("left-out rank=", e.rank); }
  std::string operator()(const effect::Begun& e) const { return absl::StrCat("begun rank=", e.rank); }
  std::string operator()(const effect::Hold& e) const { return absl::StrCat("hold", Of(e.rank), " ", Describe(e.id)); }
  std::string operator()(const effect::Drop& e) const { return e.again ? "drop again" : "drop"; }
  std::string operator()(const effect::Sum& e) const {
    return absl::StrCat("sum ", Describe(e.id), " ranks=", absl::StrJoin(e.ranks, ","), e.first ? " first" : "");
  }
  std::string operator()(const effect::Forget& e) const { return absl::StrCat("forget rank=", e.rank); }
  std::string operator()(const effect::Update& e) const {
    return absl::StrCat("update step=", e.step, " tensor=", e.tensor);
  }
  std::string operator()(const effect::Measure& e) const { return absl::StrCat("measure step=", e.step); }
  std::string operator()(const effect::Measured& e) const {
    return absl::StrCat("measured step=", e.step, " to=", e.rank, e.discarded ? " discarded" : "");
  }
  std::string operator()(const effect::Abandon& e) const { return absl::StrCat("abandon step=", e.step); }
  std::string operator()(const effect::Judge& e) const { return absl::StrCat("judge step=", e.step); }
  std::string operator()(const effect::Publish& e) const {
    return absl::StrCat("publish step=", e.step, " tensor=", e.tensor, e.rank ? absl::StrCat(" to=", *e.rank) : "");
  }
  std::string operator()(const effect::Close& e) const {
    return absl::StrCat("close step=", e.step, " ", OutcomeName(e.outcome), e.reason.empty() ? "" : " ", e.reason,
                        e.not_applied.empty() ? "" : " not_applied=", absl::StrJoin(e.not_applied, ","),
                        e.detail.empty() ? "" : ": ", e.detail);
  }
  std::string operator()(const effect::Result& e) const { return absl::StrCat("result step=", e.step, " to=", e.rank); }
  std::string operator()(const effect::Discard& e) const { return absl::StrCat("discard step=", e.step); }
};

}  // namespace

std::string Describe(const ChunkId& id) {
  return absl::StrCat(id.micro == 0 ? "" : absl::StrCat("micro=", id.micro, " "), "tensor=", id.tensor,
                      " chunk=", id.chunk);
}

std::string Describe(const StepEvent& event) { return std::visit(EventText{}, event); }
std::string Describe(const StepEffect& effect) { return std::visit(EffectText{}, effect); }
std::string Describe(const AwaitedRank& rank) {
  return absl::StrCat("rank=", rank.rank, rank.connected ? "" : " away", " for=", rank.seconds, " s: ", rank.what);
}

}  // namespace ballast
