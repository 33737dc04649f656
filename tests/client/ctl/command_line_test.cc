// What ballastctl makes of its command line, without a daemon.
#include "client/cpp/ctl/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <fstream>
#include <sstream>

#include "client/cpp/ctl/plan_spec.h"
#include "client/cpp/ctl/step_text.h"
#include "client/cpp/ctl/table.h"
#include "tests/certificates.h"
#include "tests/client/fake_daemon.h"

namespace ballast::ctl {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Answer {
  int code = 0;
  std::string out, err;
};

Answer Ballastctl(const std::vector<std::string>& words, const std::string& server_variable = "") {
  std::ostringstream out, err;
  const auto environment = [&](const std::string& name) -> std::optional<std::string> {
    if (name == "BALLAST_SERVER" && !server_variable.empty()) return server_variable;
    return std::nullopt;
  };
  const int code = Main(words, environment, out, err);
  return {code, out.str(), err.str()};
}

TEST(CommandLineTest, HelpNamesEveryCommandAndExitCode) {
  const Answer answer = Ballastctl({"--help"});
  EXPECT_EQ(answer.code, kOk);
  for (const char* word : {"status", "runs", "run RUN", "plan", "doctor", "rewind RUN", "checkpoint RUN",
                           "checkpoints RUN", "restore RUN", "verify DIR", "follow RUN", "diff A B", "delete RUN",
                           "health", "certs init", "token new", "--json", "64", "69"}) {
    EXPECT_THAT(answer.out, HasSubstr(word));
  }
}

// /metrics has RMS_t of the others, too.
TEST(CommandLineTest, HelpSaysOfWhichTensorsTheStepsHaveRms) {
  for (const char* command : {"watch", "history"}) {
    EXPECT_THAT(Ballastctl({command, "--help"}).out, HasSubstr("watched")) << command;
    EXPECT_THAT(Ballastctl({command, "--help"}).out, HasSubstr("(spikes.rms_min_elements)")) << command;
  }
}

TEST(CommandLineTest, ACommandLineWithoutACommandIsWrongUsage) {
  const Answer answer = Ballastctl({});
  EXPECT_EQ(answer.code, kUsage);
  EXPECT_THAT(answer.out, IsEmpty());
  EXPECT_THAT(answer.err, HasSubstr("usage:"));
}

TEST(CommandLineTest, AnUnknownCommandIsNamedWithTheNearest) {
  const Answer answer = Ballastctl({"docter"});
  EXPECT_EQ(answer.code, kUsage);
  EXPECT_THAT(answer.err, HasSubstr("unknown command 'docter'; did you mean doctor?"));
  EXPECT_THAT(Ballastctl({"xyzzy"}).err, HasSubstr("there are: status, runs"));
}

TEST(CommandLineTest, AnUnknownFlagIsNamedWithTheNearest) {
  const Answer answer = Ballastctl({"plan", "--parameter", "8e9"});
  EXPECT_EQ(answer.code, kUsage);
  EXPECT_THAT(answer.err, HasSubstr("unknown flag '--parameter'; did you mean --parameters?"));
  EXPECT_EQ(Ballastctl({"runs", "--force"}).code, kUsage) << "a flag of another command";
}

TEST(CommandLineTest, ACommandThatPrintsNoJsonIsAskedForNone) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"token", "new", "--json"}, {"certs", "init", "--json"}}) {
    const Answer answer = Ballastctl(words);
    EXPECT_EQ(answer.code, kUsage);
    EXPECT_THAT(answer.err, HasSubstr(words[0] + " prints no JSON; leave out --json\ntry `ballastctl " + words[0]));
  }
}

TEST(CommandLineTest, WrongValuesAreNamed) {
  EXPECT_THAT(Ballastctl({"runs", "--timeout", "soon"}).err, HasSubstr("--timeout is 'soon'"));
  EXPECT_THAT(Ballastctl({"runs", "--server"}).err, HasSubstr("--server needs a value"));
  EXPECT_THAT(Ballastctl({"runs", "--json=yes"}).err, HasSubstr("--json is a switch"));
  EXPECT_THAT(Ballastctl({"run"}).err, HasSubstr("got 0 arguments, wanted 1: ballastctl run RUN"));
  EXPECT_THAT(Ballastctl({"run", "a", "b"}).err, HasSubstr("got 2 arguments"));
}

// As a shell makes it of a variable that is not set. Whatever else the command line has: nothing is done.
TEST(CommandLineTest, AnEmptyValueIsRefusedByTheFlagsName) {
  FakeDaemon daemon(FakeOptions{.has_storage = true});
  const std::vector<std::vector<std::string>> commands = {
      {"restore", "r", "--step", "10", "--from"},
      {"restore", "r", "--from", "/in", "--step"},
      {"follow", "r", "--out", "d", "--tag"},
      {"follow", "r", "--out", "d", "--format"},
      {"follow", "r", "--out"},
      {"rewind", "r", "--to"},
      {"tag", "r", "t", "--of"},
      {"plan", "--parameters", "20", "--averages"},
      {"runs", "--token-file"},
      {"runs", "--tls-ca"},
      {"runs", "--server"},
      {"runs", "--timeout"},
      {"certs", "init", "--out", "x", "--host"},
      {"token", "new", "--out", "x", "--name", "n", "--run", "r", "--run"}};
  for (const std::vector<std::string>& words : commands) {
    for (const bool joined : {false, true}) {
      std::vector<std::string> empty = words;
      joined ? void(empty.back() += "=") : empty.push_back("");
      const Answer answer = Ballastctl(empty, daemon.address());
      EXPECT_EQ(answer.code, kUsage);
      EXPECT_THAT(answer.err, HasSubstr(words.back() + " is empty: give it a value, or leave it out")) << words[0];
      EXPECT_THAT(answer.out, IsEmpty());
    }
  }
  EXPECT_THAT(daemon.seen().restores, IsEmpty());
}

TEST(CommandLineTest, DoctorSaysWhatADaemonWantsThatAnswersNobodyWithoutAToken) {
  FakeDaemon daemon;
  daemon.RefuseGetServer({{grpc::StatusCode::UNAUTHENTICATED, "the daemon wants a token: give token_file"}});
  const Answer answer = Ballastctl({"doctor"}, daemon.address());
  EXPECT_EQ(answer.code, kRefused);
  EXPECT_THAT(answer.out,
              AllOf(HasSubstr("OK    reachable"), HasSubstr("FAIL  access"), HasSubstr("the daemon wants a token"),
                    HasSubstr("--token-file"), HasSubstr("BALLAST_TOKEN_FILE")));
  EXPECT_THAT(answer.out, ::testing::Not(HasSubstr("is it a ballastd?")));
}

TEST(CommandLineTest, AnAbsentDaemonIsUnreachable) {
  for (const char* command : {"status", "runs", "doctor", "health"}) {
    const Answer answer = Ballastctl({command, "--server", "127.0.0.1:1", "--timeout=0.05"});
    EXPECT_EQ(answer.code, kUnreachable) << command;
    EXPECT_THAT(answer.out + answer.err,
                AllOf(HasSubstr("no ballastd answers at 127.0.0.1:1"), HasSubstr("--server HOST:PORT")));
  }
}

TEST(CommandLineTest, TheServerComesFromTheFlagElseTheEnvironment) {
  FakeDaemon daemon;
  EXPECT_EQ(Ballastctl({"run", "r"}, daemon.address()).code, kOk);
  EXPECT_EQ(Ballastctl({"--server", daemon.address(), "run", "r"}, "127.0.0.1:1").code, kOk);
}

Invocation Plan(std::map<std::string, std::string> flags) {
  static std::ostringstream nowhere;
  return {.flags = std::move(flags), .out = nowhere, .err = nowhere};
}

TEST(PlanSpecTest, SpreadsParametersEvenly) {
  const auto spec = PlanSpec(Plan({{"parameters", "1e3"}, {"tensors", "3"}, {"dtype", "fp32"}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tensors(0).shape(0), 334);
  EXPECT_EQ(spec->tensors(2).shape(0), 333);
  EXPECT_EQ(spec->tensors(2).dtype(), "fp32");
  EXPECT_EQ(spec->groups(0).rule(), "adamw");
}

TEST(PlanSpecTest, TakesFormatsByName) {
  const auto spec =
      PlanSpec(Plan({{"parameters", "20"}, {"tensors", "20"}, {"formats", "*.1=fp32/fp32,*.1?=mcf/mcf"}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->groups_size(), 3);
  EXPECT_EQ(spec->groups(static_cast<int>(spec->tensors(1).group())).master(), "fp32");
  EXPECT_EQ(spec->groups(static_cast<int>(spec->tensors(12).group())).state(), "mcf");
  EXPECT_EQ(spec->tensors(2).group(), 0u);
}

TEST(PlanSpecTest, ReadersFollowTheRunWhereTheyAreCounted) {
  EXPECT_FALSE(PlanSpec(Plan({{"parameters", "20"}, {"tensors", "2"}}))->has_follow());
  EXPECT_EQ(PlanSpec(Plan({{"parameters", "20"}, {"tensors", "2"}, {"readers", "3"}}))->follow().readers(), 3u);
  EXPECT_FALSE(PlanSpec(Plan({{"parameters", "20"}, {"tensors", "2"}, {"readers", "few"}})).ok());
  EXPECT_EQ(PlanSpec(Plan({{"parameters", "20"}, {"tensors", "2"}, {"tags", "4"}}))->follow().tags(), 4u);
  EXPECT_FALSE(PlanSpec(Plan({{"parameters", "20"}, {"tensors", "2"}, {"tags", "-1"}})).ok());
}

TEST(PlanSpecTest, ReadsAShapeList) {
  const std::string path = ::testing::TempDir() + "shapes.txt";
  std::ofstream(path) << "# comment\nembed 100x64\n\nnorm 64\n";
  const auto spec = PlanSpec(Plan({{"shape-list", path}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tensors_size(), 2);
  EXPECT_THAT(spec->tensors(0).shape(), ElementsAre(100, 64));
  std::ofstream(path) << "embed 100x\n";
  EXPECT_THAT(std::string(PlanSpec(Plan({{"shape-list", path}})).status().message()),
              HasSubstr("shapes.txt line 1: shape '100x'"));
}

TEST(PlanSpecTest, NamesWhatIsWrong) {
  for (const auto& flags :
       std::vector<std::map<std::string, std::string>>{{},
                                                       {{"parameters", "0"}},
                                                       {{"parameters", "many"}},
                                                       {{"parameters", "3"}, {"tensors", "4"}},
                                                       {{"parameters", "3"}, {"shape-list", "x"}},
                                                       {{"parameters", "900"}, {"formats", "a=b"}},
                                                       {{"parameters", "900"}, {"formats", "a=b/c"}},
                                                       {{"shape-list", "/nowhere"}}}) {
    EXPECT_EQ(PlanSpec(Plan(flags)).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(TableTest, AlignsColumnsWithoutTrailingBlanks) {
  Table table({Table::Align::kLeft, Table::Align::kRight, Table::Align::kLeft});
  table.Row({"a", "10", "x"});
  table.Row({"bbb", "5", ""});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(), "a    10  x\nbbb   5\n");
}

TEST(TableTest, ShowsControlCharactersOfNames) {
  EXPECT_EQ(Visible("a\x1b[31m\n\x7f\xc2\x9b"
                    "b \xc3\xa9\xe2\x82\xac\xc2"),
            "a\\x1b[31m\\x0a\\x7f\\x9b"
            "b \xc3\xa9\xe2\x82\xac\xc2");
  EXPECT_EQ(Visible("w\u202e\u2066.\ufeff\U000E0041\u00ad \u00fc\U0001F600"),
            "w\\u202e\\u2066.\\ufeff\\ue0041\\xad \u00fc\U0001F600")
      << "what turns the line, or is not seen";
  std::ostringstream out;
  Table table({Table::kLeft, Table::kRight});
  table.Row({"w\n0", "1"});
  table.Print(out);
  EXPECT_EQ(out.str(), "w\\x0a0  1\n");
}

// Layers are named after tensors; a row is one line, and a terminal shows it as it is.
TEST(HistoryTest, ACellIsOneLineWhateverALayerIsCalled) {
  v1::GetHistoryResponse history;
  history.add_layers("a\x1b[2J,\"b\"\n\u202ec");
  v1::SpikeEvent* const event = history.add_steps()->add_spikes();
  event->set_kind(v1::SPIKE_KIND_RMS);
  event->set_layer("d\r\n=e");
  std::ostringstream out;
  PrintCsv(history, out);
  EXPECT_THAT(out.str(), HasSubstr(",spikes,\"rms a\\x1b[2J,\"\"b\"\"\\x0a\\u202ec\"\n"));
  EXPECT_THAT(out.str(), HasSubstr(",rms d\\x0d\\x0a=e\n"));
}

TEST(TableTest, SpeaksInUnits) {
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(3 << 19), "1.50 MiB");
  EXPECT_EQ(PerParameter(41, 8), "5.125 B/param");
  EXPECT_EQ(PerParameter(41, 0), "-");
  EXPECT_EQ(Grouped(8000000000), "8,000,000,000");
  EXPECT_EQ(Grouped(12), "12");
  EXPECT_EQ(Duration(0.0123), "12.3 ms");
  EXPECT_EQ(Duration(3 * 86400 + 4 * 3600), "3 d 4 h");
}

TEST(CommandLineTest, AHostWhoseNameBeginsAsASocketsDoesIsAHost) {
  std::ostringstream out, err;
  const auto environment = [](const std::string& name) {
    return name == "BALLAST_TLS_CA" ? std::optional<std::string>("/none.crt") : std::nullopt;
  };
  EXPECT_EQ(Main({"status", "--server", "unix7:1"}, environment, out, err), kRefused);
  EXPECT_THAT(err.str(), HasSubstr("/none.crt: cannot be read")) << "not connected without TLS";
  EXPECT_THAT(Ballastctl({"status", "--server", "user:secret@unix7:1"}).err,
              AllOf(HasSubstr("without a scheme"), Not(HasSubstr("secret"))));
}

// gRPC takes a port modulo 65536, and so would go to another daemon.
TEST(CommandLineTest, AServerWithoutAHostOrAPortIsRefused) {
  for (const char* server :
       {":7700", "node7:", "node7:0", "node7:73236", "node7:grpc", "node7:-1", "::1", "::1:7700"}) {
    const Answer answer = Ballastctl({"health", "--server", server});
    EXPECT_EQ(answer.code, kUsage) << server;
    EXPECT_THAT(answer.err, HasSubstr("and not HOST:PORT with a port from 1 to 65535")) << server;
  }
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"run", "r"}, {"doctor"}, {"follow", "r", "--out", "/tmp"}}) {
    std::vector<std::string> all = words;
    all.insert(all.end(), {"--server", "node7:7700,"});
    EXPECT_EQ(Ballastctl(all).code, kUsage) << words[0];
    EXPECT_THAT(Ballastctl(all).err, HasSubstr("an address between commas is empty")) << words[0];
  }
}

TEST(TokenTest, WrongWordsAreNamedAndNothingIsWritten) {
  const TestCertificates files;
  const std::string out = files.Path("a.token");
  const auto error = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"token", "new", "--out", out});
    const Answer answer = Ballastctl(words);
    EXPECT_EQ(answer.code, kUsage);
    return answer.err;
  };
  EXPECT_THAT(error({"--run", "r"}), HasSubstr("token new wants --name"));
  EXPECT_THAT(error({"--name", "a b", "--run", "r"}), HasSubstr("letters, digits"));
  EXPECT_THAT(error({"--name", "a", "--run", "r'"}), HasSubstr("in no run's name"));
  for (const char* runs : {"Big", "team_a*", "a*b", "r,", "\xff"}) {
    EXPECT_THAT(error({"--name", "a", "--run", runs}), HasSubstr("in no run's name: 1 to 63 of a-z, 0-9 and -"))
        << runs;
  }
  EXPECT_THAT(error({"--name", "a", "--run", "r", "--scope", "all"}),
              HasSubstr("wanted one of observe, pull, push, admin"));
  EXPECT_THAT(error({"--name", "a", "--run", "r", "--days", "0"}), HasSubstr("--days is from 1 to 3650"));
  EXPECT_THAT(error({"--name", "a", "--run", "r", "--most-runs", "-1"}),
              HasSubstr("--most-runs is '-1'; wanted a whole number, at most 1000000"));
  EXPECT_THAT(error({"--name", "a", "--run", "r", "--most-streams", "1000001"}),
              HasSubstr("--most-streams is '1000001'"));
  EXPECT_THAT(error({"--name", "a", "--run", "r", "--most-bytes", "much"}), HasSubstr("a size such as 64GiB"));
  EXPECT_THAT(Ballastctl({"token", "revoke"}).err, HasSubstr("token knows new alone"));
  EXPECT_FALSE(ReadSmallFile(out).ok());
}

TEST(CertsTest, PairsAreMadeThatBothEndsTake) {
  const TestCertificates files;
  const std::string out = files.Path("pki");
  const Answer answer = Ballastctl({"certs", "init", "--out", out, "--host", "node7", "--host=10.0.0.1,node8"});
  ASSERT_EQ(answer.code, kOk) << answer.err;
  EXPECT_THAT(answer.out, AllOf(HasSubstr("certificate: " + out + "/daemon.crt"),
                                HasSubstr("export BALLAST_TLS_KEY=" + out + "/trainer.key")));
  const absl::Time now = absl::Now();
  const auto daemon = ReadCertifiedKey(out + "/daemon.crt", out + "/daemon.key", TlsEnd::kDaemon, now);
  const auto trainer = ReadCertifiedKey(out + "/trainer.crt", out + "/trainer.key", TlsEnd::kClient, now);
  ASSERT_TRUE(daemon.ok() && trainer.ok()) << daemon.status() << trainer.status();
  EXPECT_EQ(trainer->subject, "spiffe://ballast/trainer");
  EXPECT_TRUE(ReadAuthorities(out + "/ca.crt", now).ok());
  EXPECT_TRUE(ReadSecretFile(out + "/ca.key").ok());
  const OpensslPtr<X509> certificate(PEM_read_bio_X509(BioOf(daemon->certificate).get(), nullptr, nullptr, nullptr));
  for (const char* host : {"localhost", "node7", "node8"}) {
    EXPECT_EQ(X509_check_host(certificate.get(), host, 0, 0, nullptr), 1) << host;
  }
  for (const char* address : {"127.0.0.1", "::1", "10.0.0.1"}) {
    EXPECT_EQ(X509_check_ip_asc(certificate.get(), address, 0), 1) << address;
  }
}

TEST(CertsTest, NothingIsOverwritten) {
  const TestCertificates files;
  files.Write("trainer.key", "precious", 0600);
  const Answer answer = Ballastctl({"certs", "init", "--out", files.Path("")});
  EXPECT_EQ(answer.code, kRefused);
  EXPECT_THAT(answer.err, HasSubstr("trainer.key: is there already"));
  EXPECT_EQ(ReadSmallFile(files.Path("trainer.key")).value(), "precious");
  EXPECT_FALSE(ReadSmallFile(files.Path("ca.crt")).ok());
}

TEST(CertsTest, WrongWordsAreNamed) {
  EXPECT_THAT(Ballastctl({"certs", "renew", "--out", "x"}).err, HasSubstr("certs knows init alone"));
  EXPECT_THAT(Ballastctl({"certs", "init"}).err, HasSubstr("certs init wants --out DIR"));
  EXPECT_THAT(Ballastctl({"certs", "init", "--out", "x", "--days", "0"}).err, HasSubstr("--days is from 1 to 3650"));
  const Answer host = Ballastctl({"certs", "init", "--out", "x", "--host", "node7:7700"});
  EXPECT_THAT(host.err, HasSubstr("'node7:7700' is neither a host's name, without a port, nor an address"));
  EXPECT_THAT(Ballastctl({"certs", "init", "--out", "x", "--host", "a,"}).err,
              HasSubstr("'' is neither a host's name"));
}

}  // namespace
}  // namespace ballast::ctl
