#include "server/ops/ops_http.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/base/clock.h"
#include "server/base/host.h"
#include "server/config/config_check.h"
#include "server/ops/runbook.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

int Connect(const std::string& address) {
  const HostPort at = ParseHostPort(address).value();
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(at.port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0) << address;
  return fd;
}

// One exchange over a socket: everything that comes back until the server closes.
std::string Exchange(const std::string& address, const std::string& request) {
  const int fd = Connect(address);
  EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string reply;
  std::array<char, 4096> part;
  for (ssize_t n; (n = recv(fd, part.data(), part.size(), 0)) > 0;) reply.append(part.data(), static_cast<size_t>(n));
  close(fd);
  return reply;
}

class OpsHttpTest : public ::testing::Test {
 protected:
  OpsContent Content() {
    return {.metrics = [] { return std::string("a_metric 1\n"); },
            .live = [this] { return live_; },
            .ready = [this] { return ready_; },
            .api = [this](const std::string& path, const std::string& query) { return Api(path, query); }};
  }

  OpsResponse Api(const std::string& path, const std::string& query) {
    if (path == "large") return {.body = std::string(8 << 20, 'x')};
    if (path == "held") released_.WaitForNotification();
    if (path == "wrong") return {.status = 400, .body = "say it otherwise\n"};
    return {.content_type = "application/json; charset=utf-8",
            .body = absl::StrCat("{\"", path, "\":\"", query, "\"}")};
  }

  void SetUp() override {
    auto ops = OpsHttp::Start("127.0.0.1:0", Content());
    ASSERT_TRUE(ops.ok()) << ops.status();
    ops_ = *std::move(ops);
  }

  std::string Ask(const std::string& method, const std::string& path, const std::string& host = "localhost") const {
    return Exchange(ops_->address(), absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: ", host, "\r\n\r\n"));
  }

  absl::Status live_, ready_;
  absl::Notification released_;
  std::unique_ptr<OpsHttp> ops_;
};

TEST_F(OpsHttpTest, ReportsThePortItPicked) {
  EXPECT_THAT(ops_->address(), StartsWith("127.0.0.1:"));
  EXPECT_NE(ParseHostPort(ops_->address())->port, 0);
}

TEST_F(OpsHttpTest, MetricsAreTextAndEveryAnswerHasItsHeaders) {
  EXPECT_THAT(Ask("GET", "/metrics"), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"),
                                            HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
                                            HasSubstr("Content-Length: 11\r\n"), EndsWith("\r\n\r\na_metric 1\n")));
  for (const char* path : {"/metrics", "/livez", "/readyz", "/help", "/nothing", "/api/v1/status"}) {
    EXPECT_THAT(Ask("GET", path),
                AllOf(HasSubstr("X-Content-Type-Options: nosniff\r\n"), HasSubstr("Cache-Control: no-store\r\n"),
                      HasSubstr("Content-Security-Policy: default-src 'none'\r\n")))
        << path;
  }
}

TEST_F(OpsHttpTest, HeadIsGetWithoutTheBody) {
  EXPECT_THAT(Ask("HEAD", "/metrics"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("Content-Length: 11\r\n"), EndsWith("\r\n\r\n")));
}

TEST_F(OpsHttpTest, HealthFollowsTheCallbacks) {
  EXPECT_THAT(Ask("GET", "/livez"), AllOf(StartsWith("HTTP/1.1 200"), EndsWith("ok\n")));
  EXPECT_THAT(Ask("GET", "/readyz"), AllOf(StartsWith("HTTP/1.1 200"), EndsWith("ok\n")));
  ready_ = absl::UnavailableError("draining");
  EXPECT_THAT(Ask("GET", "/readyz"), AllOf(StartsWith("HTTP/1.1 503 Service Unavailable"), EndsWith("draining\n")));
  EXPECT_THAT(Ask("GET", "/livez"), StartsWith("HTTP/1.1 200"));
  live_ = absl::UnavailableError("stuck");
  EXPECT_THAT(Ask("GET", "/livez"), AllOf(StartsWith("HTTP/1.1 503"), EndsWith("stuck\n")));
}

TEST_F(OpsHttpTest, HelpNamesThePaths) {
  EXPECT_THAT(Ask("GET", "/help"),
              AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("/metrics"), HasSubstr("/readyz"), HasSubstr("/api/v1/")));
}

TEST_F(OpsHttpTest, TheRunbookHasAnAnchorForEachAlert) {
  EXPECT_THAT(Ask("GET", "/runbook"),
              AllOf(HasSubstr("Content-Type: text/html; charset=utf-8\r\n"),
                    HasSubstr("<h2 id=\"ballastdown\">BallastDown</h2>"),
                    HasSubstr("<h2 id=\"ballastlossspike\">BallastLossSpike</h2>"), Not(HasSubstr("# Runbook"))));
}

TEST(RunbookTest, TextIsShownAsItIsWritten) {
  EXPECT_THAT(
      RunbookHtml("before\n# Runbook\n## AnAlert\na <b> & c\n"),
      AllOf(HasSubstr("<h2 id=\"analert\">AnAlert</h2><pre>\na &lt;b&gt; &amp; c\n"), Not(HasSubstr("before"))));
}

TEST_F(OpsHttpTest, ThePageLoadsFromItsOwnOriginAlone) {
  const std::vector<std::pair<const char*, const char*>> files = {
      {"/", "text/html; charset=utf-8"},
      {"/static/page.css", "text/css; charset=utf-8"},
      {"/static/page.js", "text/javascript; charset=utf-8"},
      {"/static/icon.svg", "image/svg+xml"},
  };
  for (const auto& [path, type] : files) {
    EXPECT_THAT(Ask("GET", path),
                AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr(absl::StrCat("Content-Type: ", type, "\r\n")),
                      HasSubstr("Content-Security-Policy: default-src 'self'; base-uri 'none'; form-action 'none'; "
                                "frame-ancestors 'none'\r\n"),
                      HasSubstr("X-Content-Type-Options: nosniff\r\n"), HasSubstr("Cache-Control: no-store\r\n"),
                      Not(HasSubstr("Access-Control"))))
        << path;
    EXPECT_THAT(Ask("GET", path, "evil.example"), StartsWith("HTTP/1.1 403")) << path;
    EXPECT_THAT(Ask("POST", path), StartsWith("HTTP/1.1 405")) << path;
  }
  // A style or a script within the page would be refused by that policy.
  EXPECT_THAT(Ask("GET", "/"), AllOf(HasSubstr("<!doctype html>"), Not(HasSubstr("style=")), Not(HasSubstr("<style")),
                                     Not(HasSubstr("<script>")), Not(HasSubstr("://"))));
}

TEST_F(OpsHttpTest, TheApiIsAskedForPathAndQuery) {
  EXPECT_THAT(Ask("GET", "/api/v1/runs/r/history?after=7&most=2"),
              AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("Content-Type: application/json; charset=utf-8\r\n"),
                    Not(HasSubstr("Access-Control")), EndsWith("\r\n\r\n{\"runs/r/history\":\"after=7&most=2\"}")));
  EXPECT_THAT(Ask("GET", "/api/v1/wrong"),
              AllOf(StartsWith("HTTP/1.1 400 Bad Request\r\n"), EndsWith("say it otherwise\n")));
  EXPECT_THAT(Ask("HEAD", "/api/v1/status"), AllOf(StartsWith("HTTP/1.1 200"), EndsWith("\r\n\r\n")));
  EXPECT_THAT(Ask("DELETE", "/api/v1/runs/r"), StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Ask("GET", "/api/v1/status", "evil.example"), StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(Ask("GET", "/api/v1"), StartsWith("HTTP/1.1 404"));
}

TEST_F(OpsHttpTest, ClientsThatNeverReadAreCutOff) {
  std::vector<int> silent;
  for (int i = 0; i < OpsHttp::kViewers; ++i) {
    silent.push_back(Connect(ops_->address()));
    const std::string request = "GET /api/v1/large HTTP/1.1\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(send(silent.back(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  }
  const double begin_s = MonotonicSeconds();
  EXPECT_THAT(Ask("GET", "/metrics"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(MonotonicSeconds() - begin_s, 30) << "3 s, and what a busy machine adds";
  for (const int fd : silent) close(fd);
}

TEST_F(OpsHttpTest, AScrapeDoesNotWaitForViewers) {
  std::vector<pollfd> viewers;
  const std::string request = "GET /api/v1/held HTTP/1.1\r\nHost: localhost\r\n\r\n";
  for (int i = 0; i < OpsHttp::kViewers + OpsHttp::kWaiting + 1; ++i) {
    viewers.push_back({.fd = Connect(ops_->address()), .events = POLLIN});
    EXPECT_EQ(send(viewers.back().fd, request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
  }
  EXPECT_EQ(poll(viewers.data(), viewers.size(), -1), 1) << "one too many is told so, once every place is taken";
  EXPECT_THAT(Ask("GET", "/metrics"), StartsWith("HTTP/1.1 200"));
  released_.Notify();
  for (const pollfd& viewer : viewers) close(viewer.fd);
}

TEST_F(OpsHttpTest, HealthDoesNotWaitForIdleConnections) {
  std::vector<int> idle;
  for (int i = 0; i < 60; ++i) idle.push_back(Connect(ops_->address()));
  const double begin_s = MonotonicSeconds();
  EXPECT_THAT(Ask("GET", "/livez"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(MonotonicSeconds() - begin_s, 10) << "four threads that wait 2 s each took 30 s";
  for (const int fd : idle) close(fd);
}

TEST_F(OpsHttpTest, HealthDoesNotWaitForClientsThatNeverRead) {
  std::vector<int> silent;
  for (int i = 0; i < 60; ++i) {
    silent.push_back(Connect(ops_->address()));
    const std::string request = "GET /api/v1/large HTTP/1.1\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(send(silent.back(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  }
  const double begin_s = MonotonicSeconds();
  EXPECT_THAT(Ask("GET", "/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(MonotonicSeconds() - begin_s, 20) << "four threads that wait 2 to 3 s each took 30 s or more";
  for (const int fd : silent) close(fd);
}

TEST_F(OpsHttpTest, UnknownPathsAre404) {
  for (const char* path : {"/nothing", "/metrics/", "/static/", "/static/page.jsx", "/static/../page.js", "/metricsx",
                           "/livez/x", "/../etc/passwd", "/%2e%2e/etc/passwd"}) {
    EXPECT_THAT(Ask("GET", path), StartsWith("HTTP/1.1 404 Not Found\r\n")) << path;
  }
  EXPECT_THAT(Ask("GET", "/metrics?name=x"), StartsWith("HTTP/1.1 200")) << "a query changes nothing";
}

TEST_F(OpsHttpTest, OtherMethodsAre405) {
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "PATCH"}) {
    EXPECT_THAT(Ask(method, "/metrics"), AllOf(StartsWith("HTTP/1.1 405"), HasSubstr("Allow: GET, HEAD\r\n")))
        << method;
  }
}

TEST_F(OpsHttpTest, NamesThatAreNotTheMachinesAreRefused) {
  for (const char* host : {"evil.example", "evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example"}) {
    EXPECT_THAT(Ask("GET", "/metrics", host), AllOf(StartsWith("HTTP/1.1 403"), Not(HasSubstr("a_metric")))) << host;
  }
  for (const char* host : {"localhost:9464", "LOCALHOST", "127.0.0.1:9464", "10.1.2.3", "[::1]:9464"}) {
    EXPECT_THAT(Ask("GET", "/metrics", host), StartsWith("HTTP/1.1 200")) << host;
  }
  EXPECT_THAT(Exchange(ops_->address(), "GET /metrics HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200"));
}

TEST_F(OpsHttpTest, TheMachinesNameIsServedWithAndWithoutItsDomain) {
  const auto status = [&](const std::string& host, const std::string& hostname) {
    return AnswerOps({.method = "GET", .path = "/", .host = host}, Content(), NamesOf(hostname, "", "")).status;
  };
  EXPECT_EQ(status("Node1.example:9464", "node1.example"), 200);
  EXPECT_EQ(status("node1.example.:9464", "node1.example"), 200);
  EXPECT_EQ(status("node1", "node1.example"), 200);
  EXPECT_EQ(status("node2", "node1.example"), 403);
  EXPECT_EQ(status(":9464", ""), 403);
  EXPECT_EQ(status("[::1", "node1"), 200) << "an odd header that still names a loopback address";
}

TEST_F(OpsHttpTest, NamesThatAreAllowedAreServedAndTheOthersToldHowTo) {
  const auto answer = [&](const std::string& host, const std::vector<std::string>& names) {
    return AnswerOps({.method = "GET", .path = "/metrics", .host = host}, Content(), names);
  };
  EXPECT_EQ(answer("ballast.default.svc:9464", {"vm.lan", "Ballast.default.svc"}).status, 200);
  EXPECT_EQ(answer("evil.example", {"*"}).status, 200);
  const OpsResponse refused = answer("vm.lan:9464", {"vm"});
  EXPECT_EQ(refused.status, 403);
  EXPECT_THAT(refused.body, HasSubstr("allow it with --ops_http.hosts vm.lan\n"));
  const auto allowing = OpsHttp::Start("127.0.0.1:0", Content(), {"vm.lan"});
  ASSERT_TRUE(allowing.ok());
  EXPECT_THAT(Exchange((*allowing)->address(), "GET /metrics HTTP/1.1\r\nHost: vm.lan:9464\r\n\r\n"),
              StartsWith("HTTP/1.1 200"));
}

TEST_F(OpsHttpTest, WithATokenAllButHealthWantsIt) {
  const auto status = [&](const std::string& path, const std::string& authorization) {
    return AnswerOps({.method = "GET", .path = path, .host = "localhost", .authorization = authorization}, Content(),
                     {}, "0123456789abcdef")
        .status;
  };
  for (const char* path : {"/", "/metrics", "/help", "/api/v1/status", "/nothing"}) {
    EXPECT_EQ(status(path, ""), 401) << path;
    EXPECT_EQ(status(path, "Bearer 0123456789abcdeg"), 401) << path;
    EXPECT_NE(status(path, "Bearer 0123456789abcdef"), 401) << path;
  }
  EXPECT_EQ(status("/livez", ""), 200);
  EXPECT_EQ(status("/readyz", ""), 200);
}

TEST(MachineNamesTest, NamesComeFromTheMachinesOwnFiles) {
  EXPECT_THAT(NamesOf("vm", "127.0.0.1 localhost\n127.0.1.1\tvm.lan vm # it\n10.0.0.1 other.lan other\n",
                      "nameserver 10.0.0.1\nsearch a.example b.example\n"),
              ::testing::ElementsAre("vm", "vm", "vm.lan", "vm", "vm.a.example", "vm.b.example"));
  EXPECT_THAT(NamesOf("node1.example", "", ""), ::testing::ElementsAre("node1.example", "node1"));
  EXPECT_THAT(NamesOf("", "127.0.0.1 localhost\n", "search a.example\n"), ::testing::IsEmpty());
}

TEST_F(OpsHttpTest, GarbageIsAnsweredOrDroppedAndTheNextRequestServed) {
  for (const std::string& garbage :
       {std::string("\r\n\r\n"), std::string("GET\r\n\r\n"), absl::StrCat(std::string(100, '\0'), "\r\n\r\n"),
        absl::StrCat("GET /", std::string(100000, 'a'), " HTTP/1.1\r\n\r\n")}) {
    const HostPort at = ParseHostPort(ops_->address()).value();
    EXPECT_NE(at.port, 0);
    const std::string reply = Exchange(ops_->address(), garbage);
    EXPECT_THAT(reply, Not(HasSubstr(" 200 ")));
  }
  EXPECT_THAT(Ask("GET", "/livez"), StartsWith("HTTP/1.1 200"));
}

TEST_F(OpsHttpTest, ManyAskAtOnce) {
  std::atomic<int> ok = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) ok += Ask("GET", "/metrics").rfind("HTTP/1.1 200", 0) == 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ok, 80);
}

TEST_F(OpsHttpTest, APortInUseIsAnErrorThatNamesItAndTheFix) {
  const auto second = OpsHttp::Start(ops_->address(), Content());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(),
            absl::StrCat("ops_http.listen: cannot listen on ", ops_->address(),
                         ": the port is in use, perhaps by another ballastd; choose another with --ops_http.listen "
                         "HOST:PORT, or switch it off with --ops_http.listen off"));
}

TEST_F(OpsHttpTest, AnAddressThatCannotBeHadIsAnError) {
  // 192.0.2.0/24 is for documentation (RFC 5737): no machine has it.
  EXPECT_THAT(std::string(OpsHttp::Start("192.0.2.1:9464", Content()).status().message()),
              AllOf(HasSubstr("192.0.2.1:9464"), HasSubstr("Cannot assign requested address")));
}

TEST_F(OpsHttpTest, ThePortIsFreeAgainAfterwards) {
  const std::string address = ops_->address();
  ops_.reset();
  EXPECT_TRUE(OpsHttp::Start(address, Content()).ok());
}

TEST_F(OpsHttpTest, OffOpensNothing) {
  const auto off = OpsHttp::Start("off", Content());
  ASSERT_TRUE(off.ok());
  EXPECT_EQ((*off)->address(), "");
}

}  // namespace
}  // namespace ballast
