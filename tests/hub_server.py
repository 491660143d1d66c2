"""A hub on loopback: the few calls of huggingface.co that creating, filling and loading a model repository takes.

It keeps the files of each commit in memory. Large and binary files go through LFS, as on the hub; the hub's newer xet
protocol, whose client is a compiled library, is not spoken: clients need HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

USER = "your-name"
LFS_SUFFIXES = (".safetensors", ".bin")


class HubServer:
    """Runs a hub in a thread, as a context manager.

    Attributes:
        url: what HF_ENDPOINT has to be.
        commits: of every repository, by name, its commits, oldest first: (summary, {path: content}).
        requests: (method, path) of every request so far.
    """

    def __init__(self):
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.requests: list[tuple[str, str]] = []
        self.lfs: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        """The newest files of a repository."""
        return self.commits[repo][-1][1]

    def environment(self, home: str) -> dict[str, str]:
        """The variables that send a process to this hub, with caches of its own below home."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": "hf_loopback",
            "HF_HOME": str(home),
        }


def commit_id(repo: str, number: int) -> str:
    return hashlib.sha1(f"{repo} {number}".encode()).hexdigest()


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status: int = 200, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reply_json(self, value: object, status: int = 200) -> None:
        self.reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply_missing(self, code: str) -> None:
        self.reply(404, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_request(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        body = self.body()
        if path == "/api/whoami-v2":
            self.reply_json({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        elif path == "/api/validate-yaml":
            self.validate_card(json.loads(body)["content"])
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path.startswith("/lfs/"):
            self.receive_lfs(parts[1], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.offer_lfs(json.loads(body))
        elif parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in hub.commits:
            self.serve_api("/".join(parts[2:4]), parts[4:], body)
        elif parts[2:3] == ["resolve"] and "/".join(parts[:2]) in hub.commits:
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.reply_missing("RepoNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def validate_card(self, content: str) -> None:
        metadata = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else None
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata"}]
        self.reply_json({"errors": [], "warnings": warnings})

    def create(self, asked: dict) -> None:
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        known = repo in self.server.hub.commits
        self.server.hub.commits.setdefault(repo, [("initial commit", {})])
        self.reply_json({"url": f"{self.server.hub.url}/{repo}", "name": repo, "id": repo}, 409 if known else 200)

    def offer_lfs(self, asked: dict) -> None:
        url = f"{self.server.hub.url}/lfs"
        objects = [
            {**item, "actions": {"upload": {"href": f"{url}/{item['oid']}", "header": {}}}}
            for item in asked["objects"]
        ]
        self.reply_json({"transfer": "basic", "objects": objects})

    def receive_lfs(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            self.reply_json({"error": "the content is not what was announced"}, 400)
            return
        self.server.hub.lfs[oid] = content
        self.reply()

    def find(self, repo: str, revision: str) -> int | None:
        """The number of a commit."""
        commits = self.server.hub.commits[repo]
        names = {commit_id(repo, number): number for number in range(len(commits))} | {"main": len(commits) - 1}
        return names.get(revision)

    def serve_api(self, repo: str, rest: list[str], body: bytes) -> None:
        action, revision = (rest + ["revision", "main"])[:2] if not rest else (rest[0], rest[1])
        number = self.find(repo, revision)
        if number is None:
            self.reply_missing("RevisionNotFound")
            return
        _, files = self.server.hub.commits[repo][number]
        if action == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                    "oid": blob_id(files[file["path"]]) if file["path"] in files else None,
                }
                for file in json.loads(body)["files"]
            ]
            self.reply_json({"files": modes})
        elif action == "commit":
            self.commit(repo, files, [json.loads(line) for line in body.splitlines()])
        elif action == "revision":
            self.reply_json(
                {
                    "id": repo,
                    "sha": commit_id(repo, number),
                    "tags": [],
                    "private": False,
                    "siblings": [{"rfilename": name} for name in sorted(files)],
                }
            )
        elif action == "tree":
            folder = "/".join(rest[2:])
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
                for name, content in sorted(files.items())
                if not folder or name.startswith(f"{folder}/")
            ]
            if folder and not entries:
                self.reply_missing("EntryNotFound")
            else:
                self.reply_json(entries)
        else:
            self.reply_json({"error": f"the loopback hub does not know {action}"}, 501)

    def commit(self, repo: str, files: dict[str, bytes], lines: list[dict]) -> None:
        hub, files, summary = self.server.hub, dict(files), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        hub.commits[repo].append((summary, files))
        commit = commit_id(repo, len(hub.commits[repo]) - 1)
        self.reply_json({"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        number = self.find(repo, revision)
        if number is None:
            self.reply_missing("RevisionNotFound")
            return
        content = self.server.hub.commits[repo][number][1].get(name)
        commit = {"X-Repo-Commit": commit_id(repo, number)}
        if content is None:
            self.reply(404, b"", {**commit, "X-Error-Code": "EntryNotFound", "X-Error-Message": "EntryNotFound"})
        else:
            self.reply(200, content, {**commit, "ETag": f'"{blob_id(content)}"'})
